"""`training.cudnn_deterministic` holds in all processes that train, and in the calling process only during the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decentnode.launch.calling_process import run_in_calling_process
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervisor import supervise
from decentnode.training.base import Direction, Update
from decentnode.training.supervised import Supervised

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
PROCESSES = {
    "a process per node": ["communication=zeromq"],
    "nodes of a process": ["communication=zeromq", "mapping.nodes_per_process=2"],
    "one process": ["communication=inproc"],
    "simulator": [],
}


class RequiresDeterminism(Supervised):
    """Raises if cuDNN may choose any kernel."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if not torch.backends.cudnn.deterministic or torch.backends.cudnn.benchmark:
            raise RuntimeError("any kernel")
        return super().local_update(round, direction)


def make_request(folder: Path, *overrides: str, simulate: bool = False) -> Request:
    return Request(QUICKSTART, [
        f"run.dir={folder}", "graph={name: ring, nodes: 2}", "mapping.nodes_per_machine=2", "node.rounds=1",
        "node.evaluate_every=0", f"training.name={__name__}:RequiresDeterminism", *overrides,
    ], simulate=simulate, in_process=simulate)  # fmt: skip


def cudnn_settings() -> tuple[bool, bool]:
    return torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark


@pytest.mark.slow
@pytest.mark.parametrize("before", [(False, True), (True, False)])
def test_the_calling_process_gets_its_cudnn_settings_back(
    before: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", before[0])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before[1])
    for asked in (True, False):
        given = make_request(tmp_path, *PROCESSES["one process"], f"training.cudnn_deterministic={str(asked).lower()}")
        outcome = run_in_calling_process(given, Observer())
        assert outcome.exit_code == (0 if asked or before[0] else 8), outcome.failure
        assert cudnn_settings() == before


@pytest.mark.slow
@pytest.mark.parametrize("way", PROCESSES)
def test_cudnn_deterministic_holds_in_all_processes_that_train(way: str, tmp_path: Path) -> None:
    for asked, code in (("true", 0), ("false", 8)):
        overrides = [*PROCESSES[way], f"training.cudnn_deterministic={asked}"]
        given = make_request(tmp_path, *overrides, simulate=way == "simulator")
        assert supervise(given, Observer()).exit_code == code
