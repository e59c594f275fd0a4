"""NodeFaults injects the faults of a node, on virtual time."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decentnode import clock, system
from decentnode.communication.counters import Counters
from decentnode.faults import AnyFault, ClockJump, FullDisk, Kill, Pause, Slow
from decentnode.metrics.events import EventLog
from decentnode.metrics.writer import MetricsWriter
from decentnode.node.faults import NodeFaults
from decentnode.system import write_atomic

WALL = 1e9


@pytest.fixture
def time() -> Iterator[clock.VirtualClock]:
    with clock.use(clock.VirtualClock(WALL)) as found:
        yield found


class NodeUnderFaults:
    """The faults of node 1, the indices of those that it asks its supervisor to inject, and its events."""

    def __init__(self, *plan: AnyFault) -> None:
        self.requested: list[int] = []
        self.events: list[dict[str, Any]] = []
        counters = Counters()
        counters.on_event = lambda _kind, _peer, detail: self.events.append(json.loads(detail))
        communication: Any = SimpleNamespace(uid=1, counters=counters, fault_injector=None)
        self.faults = NodeFaults(plan, communication, self.requested.append)
        self.faults.begin(clock.now())


def test_on_a_full_disk_events_are_written_metrics_wait_and_other_files_fail(
    tmp_path: Path, time: clock.VirtualClock
) -> None:
    under_test = NodeUnderFaults(FullDisk(nodes=(1,), at_round=2, seconds=3))
    metrics, events = MetricsWriter(tmp_path / "metrics.jsonl"), EventLog(tmp_path / "events.jsonl", 1)
    for round in range(3):
        under_test.faults.enter(round)
        metrics.write({"round": round})
        events.record("steps", {"round": round})
    assert metrics.pending == 1 and len((tmp_path / "events.jsonl").read_text().splitlines()) == 3
    with pytest.raises(OSError) as caught:
        write_atomic(tmp_path / "status.json", "{}")
    assert caught.value.errno == errno.ENOSPC and not (tmp_path / "status.json").exists()
    time.advance_to(3.1)
    write_atomic(tmp_path / "status.json", "{}")
    metrics.close()
    events.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    under_test.faults.close()
    assert not system.disk_full_checks and [event["do"] for event in under_test.events] == ["full_disk"]


def test_a_clock_jump_changes_the_wall_clock_but_no_durations(time: clock.VirtualClock) -> None:
    back, forth = (ClockJump(nodes=(1,), at_seconds=at, by_seconds=by) for at, by in ((5, -60), (7, 10)))
    under_test = NodeUnderFaults(back, forth)
    assert clock.wall() == WALL
    time.advance_to(6.0)
    assert clock.wall() == WALL + 6 - 60 and clock.now() == 6
    time.advance_to(8.0)
    assert clock.wall() == WALL + 8 - 50
    under_test.faults.close()
    assert clock.wall() == WALL + 8


def test_local_steps_are_slowed_while_the_fault_lasts(time: clock.VirtualClock) -> None:
    slow, of_another_node = Slow(nodes=(1,), at_round=1, factor=3, seconds=10), Slow(nodes=(2,), at_round=0, factor=9)
    under_test = NodeUnderFaults(slow, of_another_node)
    delays = []
    for round in range(4):
        under_test.faults.enter(round)
        time.sleep(2.0)
        delays.append(under_test.faults.slow_down(2.0))
    assert delays == [0.0, 4.0, 4.0, 0.0]


def test_a_node_requests_its_pause_and_kill_before_the_round_in_which_they_are_due(time: clock.VirtualClock) -> None:
    pause, kill = Pause(nodes=(1,), at_round=1, seconds=1), Kill(nodes=(1,), at_round=3)
    injected_by_supervisor = Kill(nodes=(1,), at_seconds=0)
    under_test = NodeUnderFaults(pause, kill, injected_by_supervisor)
    requested = []
    for round in range(4):
        under_test.faults.enter(round)
        requested.append([*under_test.requested])
    assert requested == [[], [0], [0], [0, 1]] and time.now() > 1.0  # it waited to be killed
    assert not under_test.events  # the supervisor records them
