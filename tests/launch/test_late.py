"""End to end: a node freezes for longer than the others wait, they go on without it, and it thaws."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from decentnode.metrics.reader import read_kind
from tests.launch.faults import FAULT_ROUND, FAULTY_UID, experiment
from tests.launch.test_supervisor import Witness, run

NEIGHBORS = (1, 3)
"""Of the node that freezes, on a ring of four."""
PATIENCE, AWAY, ROUNDS = 3.0, 3, 16
"""Seconds that a payload is waited for, how many such waits the frozen node stays away, and rounds of the run."""


class Thaws(Witness):
    """Wakes the node that froze once its neighbors have waited for it in vain in so many rounds."""

    def __init__(self, pid_file: Path) -> None:
        super().__init__()
        self._pid_file = pid_file
        self._reached = dict.fromkeys(NEIGHBORS, 0)

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        if uid in self._reached:
            self._reached[uid] = record.get("round", 0)
        if min(self._reached.values()) >= FAULT_ROUND + AWAY and self._pid_file.exists():
            os.kill(int(self._pid_file.read_text()), signal.SIGCONT)
            self._pid_file.unlink()


@pytest.mark.parametrize("way", ["shared_memory", "auto", "zeromq"])
@pytest.mark.slow
def test_who_was_frozen_is_given_the_models_of_its_rounds_or_none(tmp_path: Path, way: str) -> None:
    pid_file = tmp_path / "pid"
    witness = Thaws(pid_file)
    outcome = run(
        tmp_path, witness, sharing={"name": "tests.launch.faults:ChecksMarks"},
        training={**experiment()["training"], "name": "tests.launch.faults:FreezesAndMarks", "pid_file": str(pid_file)},
        communication={"name": way, "timeout_seconds": PATIENCE},
        node={"rounds": ROUNDS, "evaluate_every": 0, "missing": "return_weight"},
    )
    assert outcome.exit_code == 0, witness.failures
    assert not pid_file.exists() and outcome.run_dir is not None
    rounds = {
        uid: list(read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round")) for uid in range(4)
    }
    assert all(len(each) == ROUNDS for each in rounds.values())
    for uid in NEIGHBORS:
        without = [each["round"] for each in rounds[uid] if FAULTY_UID in each.get("missing", ())]
        assert set(range(FAULT_ROUND, FAULT_ROUND + AWAY)) <= set(without), without
        assert without[-1] < ROUNDS - 1, "it caught up"


@pytest.mark.parametrize("way", ["zeromq", "shared_memory"])
@pytest.mark.slow
def test_a_quorum_goes_on_without_a_slow_node_and_counts_what_comes_late(tmp_path: Path, way: str) -> None:
    """Over real sockets: its payloads are dropped, and weigh as much as it has trained on where they come in time."""
    witness = Witness()
    outcome = run(
        tmp_path, witness, graph={"name": "complete", "nodes": 3}, communication={"name": way, "timeout_seconds": 120},
        node={"rounds": 6, "evaluate_every": 0, "missing": "return_weight",
              "quorum": {"share": 0.5, "grace_seconds": 0.02, "weights": "samples"}},
        faults=[{"do": "slow", "nodes": [2], "factor": 100, "at_round": 1}],
    )  # fmt: skip
    assert outcome.exit_code == 0 and outcome.run_dir is not None, witness.failures
    rounds = {uid: list(read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round"))
              for uid in range(3)}  # fmt: skip
    assert all([each["round"] for each in found] == list(range(6)) for found in rounds.values())
    assert any(2 in each.get("missing", ()) for uid in (0, 1) for each in rounds[uid])
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    assert summary["rounds_without_total"] >= 1 and summary["late_payloads_total"] >= 1
