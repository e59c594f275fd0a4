"""End to end: a node freezes at any moment, and its neighbors, who go on without it, do not give each other up."""

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
from tests.launch.test_supervisor import Witness, run

PATIENCE, AWAY, ROUNDS = 2.0, 1, 16
"""Seconds that a payload is waited for, how many such waits the frozen node stays away, and rounds of the run."""


class Freezes(Witness):
    """Freezes node 2 in the middle of a round, and thaws it once all others have waited for it in vain several times.
    """

    def __init__(self, folder: Path, after: float) -> None:
        """after: seconds from where node 2 begins a round to the freeze."""
        super().__init__()
        self._folder, self._after = folder, after
        self._frozen = 0
        """The process, as long as it is."""
        self._reached: dict[int, int] = {}
        self._freezer = threading.Thread(target=self._freeze, daemon=True)
        self._freezer.start()

    def _freeze(self) -> None:
        pid_file = self._folder / f"pid{FAULTY_UID}"
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        time.sleep(self._after)
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGSTOP)
        self._frozen = pid
        (self._folder / "frozen").touch()

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        super().progress(uid, record)
        self._reached[uid] = record.get("round", 0)
        if self._frozen and min(self._reached.get(other, 0) for other in (0, 1, 3)) > FREEZE_BY_ROUND + AWAY:
            os.kill(self._frozen, signal.SIGCONT)
            self._frozen = 0


WAYS = [("zeromq", "overlapped"), ("shared_memory", "sequential"), ("auto", "overlapped")]
OTHERS = [("zeromq", "sequential"), ("shared_memory", "overlapped"), ("auto", "sequential")]


@pytest.mark.parametrize(("transport", "schedule"), [*WAYS, *OTHERS[: scale(0, 3)]])
@pytest.mark.slow
def test_who_waits_for_a_frozen_node_is_not_given_up_by_the_others(
    tmp_path: Path, transport: str, schedule: str
) -> None:
    """The model is large enough to be sent from where it lies. In which step of its round node 2 freezes is up to
    chance, so that a single run shows little where the fault is rare: DECENTNODE_STRESS repeats all of them."""
    for attempt in range(scale(1, 20)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        witness = Freezes(folder, after=0.005 * (attempt % 12))
        outcome = run(
            folder, witness, graph={"name": "complete", "nodes": 4}, model={"name": "mlp", "hidden": [1024]},
            training={**experiment()["training"], "name": "tests.launch.faults:WritesPid",
                      "pid_file": str(folder / "pid")},
            communication={"name": transport, "timeout_seconds": PATIENCE},
            node={"rounds": ROUNDS, "evaluate_every": 0, "missing": "return_weight", "schedule": schedule},
        )  # fmt: skip
        assert outcome.exit_code == 0 and outcome.run_dir is not None, witness.failures
        assert set(outcome.summary["losses"]) >= {str(FAULTY_UID)} and outcome.summary["rounds_without_total"] > 0
        without: dict[int, set[int]] = {}
        for uid in (0, 1, 3):
            records = read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round")
            without[uid] = {missing for record in records for missing in record.get("missing", ())}
        assert without == {0: {FAULTY_UID}, 1: {FAULTY_UID}, 3: {FAULTY_UID}}
