"""A node per GPU: NCCL between them, and CUDA IPC where two nodes share one. Skipped by name with fewer than two GPUs.

The same runs by gloo's batched path, which issues the same calls in the same order, are in the default suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
GPUS = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(300)]
RULES = ["{name: full}", "{name: choco, fraction: 0.2}", "{name: topk, fraction: 0.2}"]


def models_of(folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """(tensors of all nodes by "uid/name", summary.json) of a run by the command line."""
    command = [sys.executable, "-m", "decentnode", "run", str(ROOT / "configs" / "quickstart.yaml"), "--plain",
               "--run-dir", str(folder), *(part for each in overrides for part in ("--set", each))]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    latest = next(folder.glob("*/latest"))
    found = {f"{path.stem}/{name}": tensor for path in sorted(latest.glob("models/[0-9]*.safetensors"))
             for name, tensor in load_file(path).items()}  # fmt: skip
    return found, json.loads((latest / "summary.json").read_text())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=GPUS)], ids=["gloo", "nccl"]
)
def test_batches_give_the_bits_of_one_process(tmp_path: Path, device: str, backend: str, rule: str) -> None:
    """Several neighbors, compressed and whole payloads: every send meets its receive in the order of the batches."""
    nodes = min(8, torch.cuda.device_count()) if device == "cuda" else 3
    common = (f"graph={{name: {'ring' if nodes > 2 else 'complete'}, nodes: {nodes}}}", "node.rounds=6",
              f"mapping={{name: linear, nodes_per_machine: {nodes}, device: {device}}}", "node.evaluate_every=0",
              f"sharing={rule}")  # fmt: skip
    # all_reduce adds in another order, hence use_collectives: false
    options = "use_collectives: false, " + ("batched: true" if backend == "gloo" else "backend: nccl")
    way = f"communication={{name: collective, {options}}}"
    found, summary = models_of(tmp_path / "batches", *common, way)
    expected, _ = models_of(tmp_path / "one", *common, "communication=inproc")
    assert summary["rounds"] == 6 and found.keys() == expected.keys() and len(found) >= nodes
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.timeout(300)
def test_two_nodes_per_gpu_use_its_memory_and_sockets_between(tmp_path: Path) -> None:
    nodes = 2 * min(4, torch.cuda.device_count())
    devices = "[" + ", ".join(f"'cuda:{n // 2}'" for n in range(nodes)) + "]"
    common = (f"graph={{name: ring, nodes: {nodes}}}", "node.rounds=6", "node.evaluate_every=0",
              f"mapping={{name: linear, nodes_per_machine: {nodes}, device: {devices}}}")  # fmt: skip
    found, _ = models_of(tmp_path / "auto", *common, "communication=auto")
    expected, _ = models_of(tmp_path / "one", *common, "communication=inproc")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
