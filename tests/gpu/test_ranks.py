"""Ranks of a script with their models on GPUs: as many as one likes on one GPU over gloo, or one on each over NCCL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.parallel import DecentralizedDataParallel
from tests.gpu.pretended import build
from tests.parallel.ranks import run_ranks
from tests.parallel.work import comm_optimizer, compressing, models, stepping, training

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WAYS = [pytest.param(3, "gloo", id="gloo"), pytest.param(2, "nccl", id="nccl", marks=pytest.mark.multigpu)]


def on_gpus(n: int, backend: str, work: Any, *args: Any) -> list[Any]:
    return run_ranks(n, work, *args, backend=backend, device="cuda")


@pytest.mark.parametrize(("n", "backend"), WAYS)
@pytest.mark.parametrize("topology", ["complete", {"name": "ring"}], ids=str)
def test_equals_d_psgd(n: int, backend: str, topology: Any) -> None:
    """An average of all by one all_reduce, and payloads from rank to rank, which gloo sends from host memory alone."""
    for _, difference, _ in on_gpus(n, backend, training.train, topology, 7, {"bucket_size_in_mb": 0.0001}):
        assert difference < 1e-5


@pytest.mark.parametrize(("n", "backend"), WAYS)
@pytest.mark.parametrize(("sharing", "options"), [
    ({"name": "full", "compression": {"name": "bfloat16"}}, {}),
    ({"name": "choco", "choose": "all", "compression": {"name": "int8"}}, {}),
    ({"name": "choco", "fraction": 0.2, "step_size": 0.3}, {}),
    ({"name": "local_sgd", "every": 3}, {"delayed": True}),
], ids=["bfloat16", "int8", "largest", "delayed"])  # fmt: skip
def test_for_slow_links(n: int, backend: str, sharing: dict[str, Any], options: dict[str, Any]) -> None:
    """Encoded on the GPU, and decoded there."""
    for difference, _, _ in on_gpus(n, backend, compressing.train, {"name": "ring"}, sharing, options, 8):
        assert difference < 1e-4


def test_a_rule_and_its_state() -> None:
    for difference, moved in on_gpus(2, "gloo", training.train_with_rule, "complete", {"name": "local_sgd"}, "auto", 4):
        assert difference < 1e-5 and moved > 0


def test_ranks_that_may_die_train_the_same() -> None:
    for without, with_ in on_gpus(2, "gloo", training.train_with_and_without_regroup, "complete", "auto", "full"):
        assert without == with_


def test_steps_of_the_script_have_the_bits_of_steps_in_backward() -> None:
    for same, _, _ in on_gpus(2, "gloo", stepping.compare_ways_of_stepping, "sgd", {"topology": "ring"}):
        assert same


@pytest.mark.parametrize("unscales", [True, False])
def test_the_scripts_grad_scaler_has_the_bits_of_one_that_the_wrapper_steps(unscales: bool) -> None:
    """Whether it found an inf is a tensor on the GPU here."""
    assert all(on_gpus(2, "gloo", stepping.compare_grad_scalers, unscales))


@pytest.mark.parametrize(("n", "backend"), WAYS)
@pytest.mark.parametrize("name", ["EASGD+", "LSGD", "DDP"])
def test_comm_optimizers(n: int, backend: str, name: str) -> None:
    for found in on_gpus(n, backend, comm_optimizer.exchange_and_train, name, {"dist_pulling_strength": 0.2}):
        assert found["unchanged_at_start"] and found["center_is_mean"]


@pytest.mark.parametrize("name", ["EASGD+", "LSGD"])
def test_overlapped_exchanges_are_resumed_with_the_same_bits(name: str) -> None:
    """Sums of GPU tensors are in flight while numbers of the CPU are exchanged."""
    results = on_gpus(2, "gloo", comm_optimizer.exchange_with_overlap, name, 1)
    assert all(result["same_after_resume"] for result in results)


@pytest.mark.parametrize(("backend", "device", "gpus", "says"), [
    ("", "cuda", 1, "NCCL needs a GPU for each rank, but ranks 0 and 1 share"),
    ("gloo", "cuda", 1, "took 3 steps over gloo"),
    pytest.param("", "cpu", 2, "parameter weight must be on the device that the process group's backend nccl sends "
                 "from, got cpu: move the model to cuda", marks=pytest.mark.multigpu),
    pytest.param("", "cuda", 2, "took 3 steps over nccl", marks=pytest.mark.multigpu),
])  # fmt: skip
def test_what_two_ranks_of_a_script_see(tmp_path: Path, backend: str, device: str, gpus: int, says: str) -> None:
    """Each with its own GPU, or both with the first."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nfrom functools import partial\n"
        "from decentnode.parallel import DecentralizedDataParallel, initialize_dist\n"
        f"initialize_dist({backend!r} or None)\n"
        f"model = DecentralizedDataParallel(torch.nn.Linear(4, 2).to('{device}'),\n"
        "                                  optimizer=partial(torch.optim.AdamW, lr=0.1))\n"
        "for _ in range(3):\n"
        f"    model.zero_grad()\n    model(torch.randn(8, 4, device='{device}')).sum().backward()\n"
        "print('took', model.steps, 'steps over', torch.distributed.get_backend())\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "PYTHONPATH": path}  # fmt: skip
    told |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))), build.COUNT: str(gpus)}
    ranks = [os.environ | told | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    begun = [subprocess.Popen([sys.executable, str(script)], env=env, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) for env in ranks]  # fmt: skip
    try:
        for each in begun:
            said, _ = each.communicate(timeout=120)
            assert says in said, said
    finally:
        for each in begun:
            each.kill()


def test_one_rank_has_nccl_and_a_model_where_the_script_puts_it() -> None:
    script = (
        "import torch\nfrom functools import partial\n"
        "from decentnode.parallel import DecentralizedDataParallel, initialize_dist\ninitialize_dist()\n"
        "for device in ('cuda', 'cpu'):\n"
        "    model = DecentralizedDataParallel(torch.nn.Linear(4, 2).to(device),\n"
        "                                      optimizer=partial(torch.optim.SGD, lr=1))\n"
        "    model(torch.randn(8, 4, device=device)).sum().backward()\n"
        "    print(torch.distributed.get_backend(), model.steps, model.consensus_distance())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["nccl", "1", "0.0"] * 2, done.stderr


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_default_device_changes_nothing(where: str) -> None:
    """What the wrapper needs on the CPU is made there (`torch.set_default_device`)."""
    assert all(on_gpus(2, "gloo", under_a_default_device, where))


def under_a_default_device(rank: int, n: int, where: str) -> bool:
    module = models.model().to(where)
    batches = [[each.to(where) for each in models.batch(rank, t)] for t in range(3)]
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
