"""ProcessFaults suspends and wakes real local_nodes; here without a run."""

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
    """Node 3, whose process sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Worker((3,), process, SimpleNamespace())  # type: ignore[arg-type]
    process.kill()
    process.wait(10)


def read_state(worker: Worker) -> str:
    """Waits until the last signal has taken effect; returns S for a sleeping and T for a suspended process."""
    stat = Path(f"/proc/{worker.process.pid}/stat")
    for _ in range(100):
        found = stat.read_text().rpartition(") ")[2][0]
        if found in "ST":
            clock.sleep(0.01)
            return stat.read_text().rpartition(") ")[2][0]
        clock.sleep(0.01)
    return found


def test_overlapping_pauses_last_until_the_latest_end(worker: Worker) -> None:
    """The longest pause may be injected first or during another one."""
    pause = {"do": "pause", "nodes": [3], "at_round": 1}
    plan: list[dict[str, Any]] = [{**pause, "seconds": seconds} for seconds in (60, 20, 90)]
    local_nodes = SimpleNamespace(worker_of=lambda _uid: worker)
    faults = ProcessFaults(plan, [3], None)
    now = clock.now()
    faults.begin(now)
    for index in (0, 1):
        faults.inject(3, index, local_nodes)  # type: ignore[arg-type]
    assert read_state(worker) == "T" and faults.next_due_time == pytest.approx(now + 60, abs=1)
    faults.tick(now + 30, local_nodes)  # type: ignore[arg-type]
    assert read_state(worker) == "T", "the pause of 60 seconds is not over"
    faults.inject(3, 2, local_nodes)  # type: ignore[arg-type]
    faults.tick(now + 70, local_nodes)  # type: ignore[arg-type]
    assert read_state(worker) == "T" and faults.next_due_time == pytest.approx(now + 90, abs=1)
    faults.tick(now + 91, local_nodes)  # type: ignore[arg-type]
    assert read_state(worker) == "S" and faults.counts == {"pause": 3}


def test_a_suspended_process_is_woken_when_the_run_ends(worker: Worker) -> None:
    faults = ProcessFaults([{"do": "pause", "nodes": [3], "at_round": 1, "seconds": 60}], [3], None)
    local_nodes = SimpleNamespace(worker_of=lambda _uid: worker)
    faults.inject(3, 0, local_nodes)  # type: ignore[arg-type]
    assert read_state(worker) == "T"
    faults.stop()
    assert read_state(worker) == "S"
    faults.inject(3, 0, local_nodes)  # type: ignore[arg-type]
    assert read_state(worker) == "S", "a fault was injected after the end"
    worker.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
