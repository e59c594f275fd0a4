"""Processes that faults strike, without a run around them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decentnode import clock
from decentnode.launch.supervising.process_faults import ProcessFaults
from decentnode.launch.supervising.workers import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    """The process of node 3."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Worker((3,), process, SimpleNamespace())  # type: ignore[arg-type]
    process.kill()
    process.wait(10)


def state(worker: Worker) -> str:
    """S: sleeping. T: suspended. As soon as a signal that was sent has taken effect."""
    stat = Path(f"/proc/{worker.process.pid}/stat")
    for _ in range(100):
        found = stat.read_text().rpartition(") ")[2][0]
        if found in "ST":
            clock.sleep(0.01)
            return stat.read_text().rpartition(") ")[2][0]
        clock.sleep(0.01)
    return found


def test_of_two_pauses_at_once_the_longer_one_counts(worker: Worker) -> None:
    """Whichever came first; so does one that is struck in between, in its own time."""
    pause = {"do": "pause", "nodes": [3], "at_round": 1}
    plan: list[dict[str, Any]] = [{**pause, "seconds": each} for each in (60, 20, 90)]
    processes = SimpleNamespace(worker_of=lambda _uid: worker)
    strikes = ProcessFaults(plan, [3], None)
    now = clock.now()
    strikes.begin(now)
    for index in (0, 1):
        strikes.inject(3, index, processes)  # type: ignore[arg-type]
    assert state(worker) == "T" and strikes.next_due_time == pytest.approx(now + 60, abs=1)
    strikes.tick(now + 30, processes)  # type: ignore[arg-type]
    assert state(worker) == "T", "the first one is not over"
    strikes.inject(3, 2, processes)  # type: ignore[arg-type]
    strikes.tick(now + 70, processes)  # type: ignore[arg-type]
    assert state(worker) == "T" and strikes.next_due_time == pytest.approx(now + 90, abs=1)
    strikes.tick(now + 91, processes)  # type: ignore[arg-type]
    assert state(worker) == "S" and strikes.counts == {"pause": 3}


def test_who_is_suspended_goes_on_as_the_run_ends(worker: Worker) -> None:
    strikes = ProcessFaults([{"do": "pause", "nodes": [3], "at_round": 1, "seconds": 60}], [3], None)
    processes = SimpleNamespace(worker_of=lambda _uid: worker)
    strikes.inject(3, 0, processes)  # type: ignore[arg-type]
    assert state(worker) == "T"
    strikes.stop()
    assert state(worker) == "S"
    strikes.inject(3, 0, processes)  # type: ignore[arg-type]
    assert state(worker) == "S", "nobody is struck any more"
    worker.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
