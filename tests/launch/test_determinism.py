"""One seed gives one result: training on the digits gives the same bits on every transport."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervisor import supervise

ROOT = Path(__file__).parents[2]
COMMON = [
    "graph={name: regular, nodes: 6, degree: 3}", "mapping={name: linear, nodes_per_machine: 6, threads: 1}",
    "node={rounds: 5, evaluate_every: 2}", "training.local_steps=3",
]  # fmt: skip


def run_and_load_models(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """Runs the quickstart; returns the final models, local ones and the merged one, as "FILE/TENSOR"."""
    request = Request(str(ROOT / "configs" / "quickstart.yaml"), [f"run.dir={folder}", *COMMON, *overrides])
    outcome = supervise(request, Observer(), command="decentnode run quickstart.yaml")
    assert outcome.exit_code == 0 and outcome.run_dir is not None, outcome
    latest = outcome.run_dir
    assert json.loads((latest / "summary.json").read_text())["rounds"] == 5
    found = {}
    for path in sorted((latest / "models").rglob("*.safetensors")):
        place = path.relative_to(latest / "models").with_suffix("").as_posix().replace("/", "-")
        found |= {f"{place}/{name}": tensor for name, tensor in load_file(path).items()}
    assert len({key.partition("/")[0] for key in found if not key.startswith("ema-")}) == 7
    return found


@pytest.mark.parametrize("keys", [
    ["graph={name: el_local, nodes: 6, degree: 2}", "weights=null"], ["node.schedule=overlapped"],
], ids=["epidemic", "overlapped"])
@pytest.mark.slow
def test_every_transport_gives_the_bits_of_a_run_in_one_process(tmp_path: Path, keys: list[str]) -> None:
    runs = {
        way: run_and_load_models(tmp_path / way, f"communication={way}", *keys)
        for way in ("inproc", "shared_memory", "zeromq", "collective")
    }
    runs["again"] = run_and_load_models(tmp_path / "again", "communication=auto", *keys)
    other = run_and_load_models(tmp_path / "other", "communication=inproc", *keys, "seed=2")
    for way, found in runs.items():
        assert found.keys() == runs["inproc"].keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, runs["inproc"][name]), f"{name} differs between inproc and {way}"
    assert any(not torch.equal(tensor, other[name]) for name, tensor in runs["inproc"].items())


@pytest.mark.slow
def test_processes_and_one_process_give_the_same_bits_with_amp_compilation_and_ema(tmp_path: Path) -> None:
    keys = ["training.amp=bf16", "training.accumulate=2", "training.clip_norm=1.0", "training.ema=0.8",
            "training.compile={backend: eager}", "sharing=gradient_tracking"]  # fmt: skip
    one, other = (run_and_load_models(tmp_path / way, f"communication={way}", *keys) for way in ("inproc", "zeromq"))
    assert one.keys() == other.keys() and sum(key.startswith("ema-") for key in one) == sum(
        not key.startswith("ema-") for key in one)  # fmt: skip
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
def test_a_hybrid_of_gloo_cliques_and_zeromq_gives_the_models_of_zeromq_alone(tmp_path: Path) -> None:
    mixed = "communication={name: hybrid, same_host: ipc, cliques: [[0, 1], [2, 3]]}"
    edges = "graph={name: complete, nodes: 6}"
    plain = run_and_load_models(tmp_path / "a", "communication=zeromq", edges)
    found = run_and_load_models(tmp_path / "b", mixed, edges)
    assert found.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in found.items())
    logs = [path.read_text() for path in sorted((tmp_path / "b").glob("*/latest/nodes/*/log.txt"))]
    assert ["by gloo" in log for log in logs] == [True] * 4 + [False] * 2
