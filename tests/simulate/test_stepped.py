"""The engine `stepped`: a simulated run gives the same files and bits as a run with processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from decentnode.build import build_in_process
from decentnode.data.partition.iid import Iid
from decentnode.experiment import load
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervisor import supervise

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
COMMON = ["graph={name: regular, nodes: 4, degree: 2}", "node={rounds: 3, evaluate_every: 2}"]
ONE = ["mapping={name: linear, nodes_per_machine: 4, threads: 1}"]
TWO = ["mapping={name: linear, machines: 2, nodes_per_machine: 2, addresses: [10.1.2.3, 10.1.2.4], threads: 1}"]


def run(folder: Path, *overrides: str, **request: Any) -> Outcome:
    outcome = supervise(Request(QUICKSTART, [f"run.dir={folder}", *COMMON, *overrides], **request), Observer())
    assert outcome.exit_code == 0 and outcome.run_dir is not None
    return outcome


def models_of(outcome: Outcome) -> dict[str, dict[str, np.ndarray]]:
    assert outcome.run_dir is not None
    return {path.name: load_file(path) for path in sorted((outcome.run_dir / "models").glob("*.safetensors"))}


@pytest.mark.slow
def test_a_simulated_run_has_the_models_and_figures_of_a_run_with_processes(tmp_path: Path) -> None:
    real = run(tmp_path / "run", *ONE)
    simulated = run(tmp_path / "simulated", *ONE, "simulate.engine=stepped", in_process=True, simulate=True)
    assert simulated.summary["engine"]["name"] == "stepped" and "engine" not in real.summary
    assert simulated.summary["digest"] == real.summary["digest"]
    found, wanted = models_of(simulated), models_of(real)
    assert found.keys() == wanted.keys() and len(found) == 5
    for name in wanted:
        for key, value in wanted[name].items():
            np.testing.assert_array_equal(found[name][key], value)
    for figure in ("accuracy_merged", "loss_mean", "consensus_distance", "rounds"):
        assert simulated.summary[figure] == real.summary[figure], figure
    of_data = [[node["bytes_data"] for node in each.summary["nodes"].values()] for each in (simulated, real)]
    assert of_data[0] == of_data[1]


@pytest.mark.slow
def test_a_mapping_of_several_machines_is_simulated_on_this_one(tmp_path: Path) -> None:
    outcome = run(tmp_path, *TWO, in_process=True, simulate=True)
    assert len(outcome.summary["nodes"]) == 4


def test_data_is_opened_and_partitioned_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    dealt = []
    split = Iid.split

    def counted(self: Iid, *arguments: Any) -> list[np.ndarray]:
        dealt.append(self)
        return split(self, *arguments)

    monkeypatch.setattr(Iid, "split", counted)
    experiment = load(QUICKSTART, [*COMMON, *ONE, "data.partition=iid"], check=False)
    nodes = build_in_process(experiment)
    assert len(dealt) == 1
    sources = {id(node.training.share.splits["test"][0]) for node in nodes}  # type: ignore[attr-defined]
    assert len(sources) == 1
