"""The faults that a node meets by itself, on virtual time."""

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


class Bench:
    """Node 1, what it asks its supervisor for, and what its events say."""

    def __init__(self, *plan: AnyFault) -> None:
        self.asked: list[int] = []
        self.events: list[dict[str, Any]] = []
        counters = Counters()
        counters.on_event = lambda _kind, _peer, detail: self.events.append(json.loads(detail))
        communication: Any = SimpleNamespace(uid=1, counters=counters, fault_course=None)
        self.faults = NodeFaults(plan, communication, self.asked.append)
        self.faults.begin(clock.now())


def test_a_full_disk_takes_nothing_but_the_records_of_the_run(tmp_path: Path, time: clock.VirtualClock) -> None:
    bench = Bench(FullDisk(nodes=(1,), at_round=2, seconds=3))
    metrics, events = MetricsWriter(tmp_path / "metrics.jsonl"), EventLog(tmp_path / "events.jsonl", 1)
    for round in range(3):
        bench.faults.enter(round)
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
    bench.faults.close()
    assert not system.disk_full_checks and [each["do"] for each in bench.events] == ["full_disk"]


def test_the_time_of_day_jumps_and_durations_do_not(time: clock.VirtualClock) -> None:
    back, forth = (ClockJump(nodes=(1,), at_seconds=at, by_seconds=by) for at, by in ((5, -60), (7, 10)))
    bench = Bench(back, forth)
    assert clock.wall() == WALL
    time.advance_to(6.0)
    assert clock.wall() == WALL + 6 - 60 and clock.now() == 6
    time.advance_to(8.0)
    assert clock.wall() == WALL + 8 - 50
    bench.faults.close()
    assert clock.wall() == WALL + 8


def test_local_steps_take_longer_while_it_lasts(time: clock.VirtualClock) -> None:
    bench = Bench(Slow(nodes=(1,), at_round=1, factor=3, seconds=10), Slow(nodes=(2,), at_round=0, factor=9))
    took = []
    for round in range(4):
        bench.faults.enter(round)
        time.sleep(2.0)
        took.append(bench.faults.slow_down(2.0))
    assert took == [0.0, 4.0, 4.0, 0.0]


def test_a_node_asks_to_be_struck_as_it_begins_the_round_and_does_not_begin_it(time: clock.VirtualClock) -> None:
    pause, kill = Pause(nodes=(1,), at_round=1, seconds=1), Kill(nodes=(1,), at_round=3)
    bench = Bench(pause, kill, Kill(nodes=(1,), at_seconds=0))  # the last one is the supervisor's
    asked = []
    for round in range(4):
        bench.faults.enter(round)
        asked.append([*bench.asked])
    assert asked == [[], [0], [0], [0, 1]] and time.now() > 1.0  # it waits to be killed
    assert not bench.events  # the supervisor notes them
