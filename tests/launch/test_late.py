"""End to end: a node freezes for longer than the others wait; they continue without it until it thaws."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from decentnode.metrics.reader import read_kind
from tests.launch.faults import FAULT_ROUND, FAULTY_UID, experiment
from tests.launch.test_supervisor import RunRecorder, run_tiny

NEIGHBORS = (1, 3)
"""The neighbors of the node that freezes, on a ring of four."""
TIMEOUT_SECONDS, ROUNDS_AWAY, ROUNDS = 3.0, 3, 16
"""How long a node waits for a payload, in how many rounds the frozen node is missing, and the rounds of the run."""


class WakesFrozenNode(RunRecorder):
    """Wakes the frozen node once its neighbors have finished ROUNDS_AWAY rounds without it."""

    def __init__(self, pid_file: Path) -> None:
        super().__init__()
        self._pid_file = pid_file
        self._reached = dict.fromkeys(NEIGHBORS, 0)

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        if uid in self._reached:
            self._reached[uid] = record.get("round", 0)
        if min(self._reached.values()) >= FAULT_ROUND + ROUNDS_AWAY and self._pid_file.exists():
            os.kill(int(self._pid_file.read_text()), signal.SIGCONT)
            self._pid_file.unlink()


@pytest.mark.parametrize("way", ["shared_memory", "auto", "zeromq"])
@pytest.mark.slow
def test_a_thawed_node_mixes_only_payloads_of_its_own_round(tmp_path: Path, way: str) -> None:
    pid_file = tmp_path / "pid"
    recorder = WakesFrozenNode(pid_file)
    outcome = run_tiny(
        tmp_path, recorder, sharing={"name": "tests.launch.faults:ChecksMarks"},
        training={**experiment()["training"], "name": "tests.launch.faults:FreezesAndMarks", "pid_file": str(pid_file)},
        communication={"name": way, "timeout_seconds": TIMEOUT_SECONDS},
        node={"rounds": ROUNDS, "evaluate_every": 0, "missing": "return_weight"},
    )
    assert outcome.exit_code == 0, recorder.failures
    assert not pid_file.exists() and outcome.run_dir is not None
    rounds = {
        uid: list(read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round")) for uid in range(4)
    }
    assert all(len(records) == ROUNDS for records in rounds.values())
    for uid in NEIGHBORS:
        without = [record["round"] for record in rounds[uid] if FAULTY_UID in record.get("missing", ())]
        assert set(range(FAULT_ROUND, FAULT_ROUND + ROUNDS_AWAY)) <= set(without), without
        assert without[-1] < ROUNDS - 1, "the thawed node did not catch up"


@pytest.mark.parametrize("way", ["zeromq", "shared_memory"])
@pytest.mark.slow
def test_a_quorum_continues_without_a_slow_node_and_counts_its_late_payloads(tmp_path: Path, way: str) -> None:
    """Over real sockets. Late payloads are dropped; those in time have weights by their nodes' samples."""
    recorder = RunRecorder()
    outcome = run_tiny(
        tmp_path, recorder, graph={"name": "complete", "nodes": 3}, communication={"name": way, "timeout_seconds": 120},
        node={"rounds": 6, "evaluate_every": 0, "missing": "return_weight",
              "quorum": {"share": 0.5, "grace_seconds": 0.02, "weights": "samples"}},
        faults=[{"do": "slow", "nodes": [2], "factor": 100, "at_round": 1}],
    )  # fmt: skip
    assert outcome.exit_code == 0 and outcome.run_dir is not None, recorder.failures
    rounds = {uid: list(read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round"))
              for uid in range(3)}  # fmt: skip
    assert all([record["round"] for record in records] == list(range(6)) for records in rounds.values())
    assert any(2 in record.get("missing", ()) for uid in (0, 1) for record in rounds[uid])
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    assert summary["rounds_without_total"] >= 1 and summary["late_payloads_total"] >= 1
