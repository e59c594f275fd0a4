"""Ranks of scripts with models on GPUs: any number of ranks on one GPU over gloo, or one on each GPU over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.parallel import DecentralizedDataParallel
from tests.conftest import free_ports
from tests.gpu.pretended import build
from tests.parallel.ranks import run_ranks
from tests.parallel.work import comm_optimizer, compressing, models, stepping, training

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
BACKENDS = [pytest.param(3, "gloo", id="gloo"), pytest.param(2, "nccl", id="nccl", marks=pytest.mark.multigpu)]


def on_gpus(n: int, backend: str, work: Any, *args: Any) -> list[Any]:
    return run_ranks(n, work, *args, backend=backend, device="cuda")


@pytest.mark.parametrize(("n", "backend"), BACKENDS)
@pytest.mark.parametrize("topology", ["complete", {"name": "ring"}], ids=str)
def test_equals_d_psgd(n: int, backend: str, topology: Any) -> None:
    """The complete topology averages by one all_reduce; on a ring, gloo sends payloads from host memory."""
    for _, difference, _ in on_gpus(n, backend, training.train, topology, 7, {"bucket_size_in_mb": 0.0001}):
        assert difference < 1e-5


@pytest.mark.parametrize(("n", "backend"), BACKENDS)
@pytest.mark.parametrize(("sharing", "options"), [
    ({"name": "full", "compression": {"name": "bfloat16"}}, {}),
    ({"name": "choco", "choose": "all", "compression": {"name": "int8"}}, {}),
    ({"name": "choco", "fraction": 0.2, "step_size": 0.3}, {}),
    ({"name": "local_sgd", "every": 3}, {"delayed": True}),
], ids=["bfloat16", "int8", "largest", "delayed"])  # fmt: skip
def test_compressed_and_delayed_exchanges_equal_the_simulation(
    n: int, backend: str, sharing: dict[str, Any], options: dict[str, Any]
) -> None:
    """Payloads are encoded and decoded on the GPU."""
    for difference, _, _ in on_gpus(n, backend, compressing.train, {"name": "ring"}, sharing, options, 8):
        assert difference < 1e-4


def test_a_rule_and_its_saved_state_equal_the_simulation() -> None:
    for difference, moved in on_gpus(2, "gloo", training.train_with_rule, "complete", {"name": "local_sgd"}, "auto", 4):
        assert difference < 1e-5 and moved > 0


def test_regroup_changes_no_bit_while_no_rank_dies() -> None:
    work = training.train_with_and_without_regroup
    for without, with_regroup in on_gpus(2, "gloo", work, "complete", "auto", "full"):
        assert without == with_regroup


def test_steps_of_the_script_have_the_bits_of_steps_in_backward() -> None:
    for same, _, _ in on_gpus(2, "gloo", stepping.compare_ways_of_stepping, "sgd", {"topology": "ring"}):
        assert same


@pytest.mark.parametrize("unscales", [True, False])
def test_the_scripts_grad_scaler_has_the_bits_of_one_that_the_wrapper_steps(unscales: bool) -> None:
    """Whether it found an inf is a tensor on the GPU here."""
    assert all(on_gpus(2, "gloo", stepping.compare_grad_scalers, unscales))


@pytest.mark.parametrize(("n", "backend"), BACKENDS)
@pytest.mark.parametrize("name", ["EASGD+", "LSGD", "DDP"])
def test_comm_optimizers_start_from_the_mean_and_train(n: int, backend: str, name: str) -> None:
    results = on_gpus(n, backend, comm_optimizer.exchange_and_train, name, {"dist_pulling_strength": 0.2})
    for result in results:
        assert result["unchanged_at_start"] and result["center_is_mean"]
    first, last = (sum(result["losses"][k] for result in results) for k in (0, 1))
    assert last < first


@pytest.mark.parametrize("name", ["EASGD+", "LSGD"])
def test_overlapped_exchanges_are_resumed_with_the_same_bits(name: str) -> None:
    """Sums of GPU tensors are in flight while numbers of the CPU are exchanged."""
    results = on_gpus(2, "gloo", comm_optimizer.exchange_with_overlap, name, 1)
    assert all(result["same_after_resume"] for result in results)


@pytest.mark.parametrize(("start", "device", "gpus", "message"), [
    ("initialize_dist()", "cuda", 1, "NCCL needs a GPU for each rank, but ranks 0 and 1 share"),
    ("initialize_dist('gloo')", "cuda", 1, "took 3 steps over gloo"),
    pytest.param("initialize_dist()", "cpu", 2, "parameter weight must be on the device that the process group's "
                 "backend nccl sends from, got cpu: move the model to cuda", marks=pytest.mark.multigpu),
    pytest.param("initialize_dist()", "cuda", 2, "took 3 steps over nccl", marks=pytest.mark.multigpu),
    pytest.param("torch.cuda.set_device(int(os.environ['RANK'])); torch.distributed.init_process_group()", "cuda", 2,
                 "took 3 steps over undefined", marks=pytest.mark.multigpu),
    pytest.param("initialize_dist('cpu:gloo,cuda:nccl')", "cuda", 2, "took 3 steps over cpu:gloo,cuda:nccl",
                 marks=pytest.mark.multigpu),
])  # fmt: skip
def test_two_ranks_of_a_script_train_or_are_refused(
    tmp_path: Path, start: str, device: str, gpus: int, message: str
) -> None:
    """Each rank has its own GPU, or both see only the first."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch\nfrom functools import partial\n"
        "from decentnode.parallel import DecentralizedDataParallel, initialize_dist\n"
        f"{start}\n"
        f"model = DecentralizedDataParallel(torch.nn.Linear(4, 2).to('{device}'),\n"
        "                                  optimizer=partial(torch.optim.AdamW, lr=0.1))\n"
        "for _ in range(3):\n"
        f"    model.zero_grad()\n    model(torch.randn(8, 4, device='{device}')).sum().backward()\n"
        "print('took', model.steps, 'steps over', torch.distributed.get_backend())\n"
    )
    port = free_ports(1)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "PYTHONPATH": path}  # fmt: skip
    variables |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))), build.COUNT: str(gpus)}
    environments = [os.environ | variables | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    processes = [subprocess.Popen([sys.executable, str(script)], env=env, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT) for env in environments]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert message in output, output
    finally:
        for process in processes:
            process.kill()


def test_a_single_rank_uses_nccl_and_leaves_the_model_on_its_device() -> None:
    script = (
        "import torch\nfrom functools import partial\n"
        "from decentnode.parallel import DecentralizedDataParallel, initialize_dist\ninitialize_dist()\n"
        "for device in ('cuda', 'cpu'):\n"
        "    model = DecentralizedDataParallel(torch.nn.Linear(4, 2).to(device),\n"
        "                                      optimizer=partial(torch.optim.SGD, lr=1))\n"
        "    model(torch.randn(8, 4, device=device)).sum().backward()\n"
        "    print(torch.distributed.get_backend(), model.steps, model.consensus_distance())\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert process.stdout.split() == ["nccl", "1", "0.0"] * 2, process.stderr


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_training_works_with_a_default_device(where: str) -> None:
    """After `torch.set_default_device("cuda")`, the wrapper must still make on the CPU what it needs there."""
    assert all(on_gpus(2, "gloo", train_with_default_device, where))


def train_with_default_device(rank: int, n: int, where: str) -> bool:
    module = models.model().to(where)
    batches = [[tensor.to(where) for tensor in models.batch(rank, t)] for t in range(3)]
    torch.set_default_device("cuda")
    try:
        wrapped = DecentralizedDataParallel(module, optimizer=partial(torch.optim.AdamW, lr=0.1, fused=True),
                                            sharing={"name": "choco", "compression": {"name": "int8"}})
        for x, y in batches:
            wrapped.zero_grad()
            (wrapped(x) - y).square().mean().backward()
        return wrapped.steps == 3 and 0 < wrapped.consensus_distance() < 1
    finally:
        torch.set_default_device("cpu")
