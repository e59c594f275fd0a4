"""End to end: a node freezes at any moment; its neighbors continue without it, but with each other."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from decentnode.metrics.reader import read_kind
from tests.conftest import scale, wait_until
from tests.launch.faults import FAULTY_UID, FREEZE_BY_ROUND, experiment
from tests.launch.test_supervisor import RunRecorder, run_tiny

TIMEOUT_SECONDS, ROUNDS_AWAY, ROUNDS = 2.0, 1, 16
"""How long a node waits for a payload, in how many rounds the frozen node is missing, and the rounds of the run."""


class FreezesNode(RunRecorder):
    """Freezes node 2 in the middle of a round, and thaws it once all others have finished rounds without it."""

    def __init__(self, folder: Path, after: float) -> None:
        """after: seconds from the begin of a round of node 2 to the freeze."""
        super().__init__()
        self._folder, self._after = folder, after
        self._frozen_pid = 0
        """0 while the process is not frozen."""
        self._reached: dict[int, int] = {}
        self._freezer = threading.Thread(target=self._freeze, daemon=True)
        self._freezer.start()

    def _freeze(self) -> None:
        pid_file = self._folder / f"pid{FAULTY_UID}"
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        time.sleep(self._after)
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGSTOP)
        self._frozen_pid = pid
        (self._folder / "frozen").touch()

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        self._reached[uid] = record.get("round", 0)
        reached_by_all = min(self._reached.get(other, 0) for other in (0, 1, 3))
        if self._frozen_pid and reached_by_all > FREEZE_BY_ROUND + ROUNDS_AWAY:
            os.kill(self._frozen_pid, signal.SIGCONT)
            self._frozen_pid = 0


TRANSPORTS_AND_SCHEDULES = [("zeromq", "overlapped"), ("shared_memory", "sequential"), ("auto", "overlapped")]
STRESS_ONLY = [("zeromq", "sequential"), ("shared_memory", "overlapped"), ("auto", "sequential")]


@pytest.mark.parametrize(("transport", "schedule"), [*TRANSPORTS_AND_SCHEDULES, *STRESS_ONLY[: scale(0, 3)]])
@pytest.mark.slow
def test_nodes_that_wait_for_a_frozen_node_are_not_missed_by_the_others(
    tmp_path: Path, transport: str, schedule: str
) -> None:
    """The model is large enough to be sent without a copy. In which step of its round node 2 freezes is up to chance,
    so that a single run rarely shows a rare defect: DECENTNODE_STRESS repeats all of them."""
    for attempt in range(scale(1, 20)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        recorder = FreezesNode(folder, after=0.005 * (attempt % 12))
        outcome = run_tiny(
            folder, recorder, graph={"name": "complete", "nodes": 4}, model={"name": "mlp", "hidden": [1024]},
            training={**experiment()["training"], "name": "tests.launch.faults:WritesPid",
                      "pid_file": str(folder / "pid")},
            communication={"name": transport, "timeout_seconds": TIMEOUT_SECONDS},
            node={"rounds": ROUNDS, "evaluate_every": 0, "missing": "return_weight", "schedule": schedule},
        )  # fmt: skip
        assert outcome.exit_code == 0 and outcome.run_dir is not None, recorder.failures
        assert set(outcome.summary["losses"]) >= {str(FAULTY_UID)} and outcome.summary["rounds_without_total"] > 0
        missing_of: dict[int, set[int]] = {}
        for uid in (0, 1, 3):
            records = read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round")
            missing_of[uid] = {missing for record in records for missing in record.get("missing", ())}
        assert missing_of == {0: {FAULTY_UID}, 1: {FAULTY_UID}, 3: {FAULTY_UID}}
