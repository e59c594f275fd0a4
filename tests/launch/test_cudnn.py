"""`training.cudnn_deterministic` holds wherever nodes train, and in the calling process no longer than the run."""

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
WAYS = {
    "a process per node": ["communication=zeromq"],
    "nodes of a process": ["communication=zeromq", "mapping.nodes_per_process=2"],
    "one process": ["communication=inproc"],
    "simulator": [],
}


class Looks(Supervised):
    """Says that cuDNN may take any kernel by raising."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if not torch.backends.cudnn.deterministic or torch.backends.cudnn.benchmark:
            raise RuntimeError("any kernel")
        return super().local_update(round, direction)


def request(folder: Path, *overrides: str, simulate: bool = False) -> Request:
    return Request(QUICKSTART, [
        f"run.dir={folder}", "graph={name: ring, nodes: 2}", "mapping.nodes_per_machine=2", "node.rounds=1",
        "node.evaluate_every=0", f"training.name={__name__}:Looks", *overrides,
    ], simulate=simulate, in_process=simulate)  # fmt: skip


def settings() -> tuple[bool, bool]:
    return torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark


@pytest.mark.slow
@pytest.mark.parametrize("before", [(False, True), (True, False)])
def test_the_calling_process_has_its_settings_back(
    before: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", before[0])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before[1])
    for asked in (True, False):
        given = request(tmp_path, *WAYS["one process"], f"training.cudnn_deterministic={str(asked).lower()}")
        outcome = run_in_calling_process(given, Observer())
        assert outcome.exit_code == (0 if asked or before[0] else 8), outcome.failure
        assert settings() == before


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_holds_where_nodes_train(way: str, tmp_path: Path) -> None:
    for asked, code in (("true", 0), ("false", 8)):
        given = request(tmp_path, *WAYS[way], f"training.cudnn_deterministic={asked}", simulate=way == "simulator")
        assert supervise(given, Observer()).exit_code == code
