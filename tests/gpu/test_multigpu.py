"""Several GPUs: NCCL with one node per GPU, and CUDA IPC where two nodes share one. Skipped with fewer than two GPUs.

The same runs over gloo's batched path, which issues the same calls in the same order, need no GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import Schema
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervisor import supervise
from decentnode.payload import Payload, TensorSpec
from tests.communication.receive.test_mailbox import run_steps

ROOT = Path(__file__).parents[2]
GPUS = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(300)]
RULES = ["{name: full}", "{name: choco, fraction: 0.2}", "{name: topk, fraction: 0.2}"]


def run_experiment(folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Runs an experiment with a process for each node. Returns (tensors of all nodes by "uid/name", summary.json)."""
    request = Request(str(ROOT / "configs" / "quickstart.yaml"), [f"run.dir={folder}", *overrides])
    outcome = supervise(request, Observer(), command="decentnode run quickstart.yaml")
    assert outcome.exit_code == 0 and outcome.run_dir is not None, outcome
    tensors = {f"{path.stem}/{name}": tensor for path in sorted(outcome.run_dir.glob("models/[0-9]*.safetensors"))
               for name, tensor in load_file(path).items()}  # fmt: skip
    return tensors, json.loads((outcome.run_dir / "summary.json").read_text())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=GPUS)], ids=["gloo", "nccl"]
)
@pytest.mark.slow
def test_batched_exchanges_give_the_bits_of_one_process(tmp_path: Path, device: str, backend: str, rule: str) -> None:
    """With several neighbors, and with compressed and whole payloads, every send must match its receive in the order of
    the batches."""
    nodes = min(8, torch.cuda.device_count()) if device == "cuda" else 3
    common = (f"graph={{name: {'ring' if nodes > 2 else 'complete'}, nodes: {nodes}}}", "node.rounds=6",
              f"mapping={{name: linear, nodes_per_machine: {nodes}, device: {device}}}", "node.evaluate_every=0",
              f"sharing={rule}")  # fmt: skip
    # use_collectives: false, as all_reduce adds in another order
    options = "use_collectives: false, " + ("batched: true" if backend == "gloo" else "backend: nccl")
    communication = f"communication={{name: collective, {options}}}"
    tensors, summary = run_experiment(tmp_path / "batches", *common, communication)
    expected, _ = run_experiment(tmp_path / "one", *common, "communication=inproc")
    assert summary["rounds"] == 6 and tensors.keys() == expected.keys() and len(tensors) >= nodes
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.timeout(300)
def test_two_nodes_per_gpu_give_the_bits_of_one_process(tmp_path: Path) -> None:
    nodes = 2 * min(4, torch.cuda.device_count())
    devices = "[" + ", ".join(f"'cuda:{n // 2}'" for n in range(nodes)) + "]"
    common = (f"graph={{name: ring, nodes: {nodes}}}", "node.rounds=6", "node.evaluate_every=0",
              f"mapping={{name: linear, nodes_per_machine: {nodes}, device: {devices}}}")  # fmt: skip
    tensors, _ = run_experiment(tmp_path / "auto", *common, "communication=auto")
    expected, _ = run_experiment(tmp_path / "one", *common, "communication=inproc")
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_nodes_of_one_process_receive_tensors_on_their_own_gpu() -> None:
    devices = [torch.device("cuda", n) for n in range(2)]
    schema = Schema(3, {"x": TensorSpec(torch.float32, 3)}, True)
    hub = Hub(2)
    nodes = [Inproc(Inproc.Config(name="inproc"), uid=uid, hub=hub, schemas=(schema, replace(schema, mailbox=1)),
                    device=devices[uid]) for uid in range(2)]  # fmt: skip
    models = [torch.full((3,), float(uid), device=devices[uid]) for uid in range(2)]
    exchanges = [node.exchange(0, {1 - node.uid: Payload({"x": models[node.uid]})}, (1 - node.uid,)) for node in nodes]
    means = [node.mean("k", models[node.uid]) for node in nodes]
    for node, exchange, mean in zip(nodes, exchanges, means, strict=True):
        other = 1 - node.uid
        node.publish(0, {other: Payload({"x": models[node.uid]})}, 1)
        (arrival,) = exchange.arrivals(1)
        assert torch.equal(arrival.received[other].tensors["x"], models[other].to(devices[node.uid]))
        assert torch.equal(mean.wait(1)[0], torch.full((3,), 0.5, device=devices[node.uid]))
    for node in nodes:
        (step,) = run_steps(node.collect_steps(1))
        assert step.payload.tensors["x"].device == devices[node.uid]
