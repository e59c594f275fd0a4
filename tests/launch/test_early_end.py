"""What a failure, a signal and an order to stop mean to a run, without one."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from decentnode import clock
from decentnode.launch.children.messages import Failed, OrderRun, PeerFailure, StopRun
from decentnode.launch.supervising.early_end import CAUSE_WAIT_SECONDS, GRACE_SECONDS, EarlyEnd
from decentnode.wire.orders import MEET_ROUNDS, MEET_SECONDS
from tests.launch.stand_ins import local_run


def test_the_cause_is_the_failure_that_others_follow_from() -> None:
    run, heard = local_run()
    end = EarlyEnd(run)
    end.fail(Failed(1, 5, "nothing from node 0", "", follower=True))
    assert end.kills_soon and heard.causes == []
    end.fail(Failed(0, 8, "a bug", ""))
    end.report_cause()
    assert heard.causes == [0], "once"
    assert [type(each) for each in run.nodes.workers[0].told] == [PeerFailure], "of the first"


def test_who_does_not_end_in_time_is_killed_and_named() -> None:
    run, heard = local_run()
    end = EarlyEnd(run)
    end.tick(clock.now() + 1e6)
    assert not any(worker.killed for worker in run.nodes.workers), "nothing has failed"
    before = clock.now()
    end.fail(Failed(1, 5, "nothing from node 0", "", follower=True))
    end.tick(before + CAUSE_WAIT_SECONDS + 0.5)
    assert heard.causes == [1] and end.silent == []
    run.nodes.workers[1].failed = {1}
    end.tick(clock.now() + GRACE_SECONDS)
    assert all(worker.killed for worker in run.nodes.workers) and end.silent == [0]


@pytest.mark.parametrize(("phase", "count", "killed"), [
    ("starting", 1, True), ("joining", 1, True), ("running", 1, False), ("running", 2, True),
])  # fmt: skip
def test_a_first_signal_of_a_run_that_has_begun_stops_it_and_others_kill(
    phase: str, count: int, killed: bool
) -> None:
    run, _ = local_run(phase)
    end = EarlyEnd(run)
    received: Any = run.command.signals.received
    received += [signal.SIGINT] * count
    end.handle_signals()
    assert (end.killed_by_user, end.kills_soon) == (killed, killed)
    assert (run.nodes.workers[0].told == [StopRun()]) == (phase == "running")
    end.tick(clock.now())
    assert end.silent == [], "the user knows"


def test_an_order_to_stop_is_obeyed_once() -> None:
    run, heard = local_run()
    end = EarlyEnd(run)
    assert end.stop_after_round() and not end.stop_after_round()
    assert run.nodes.workers[1].told == [StopRun()] and len(heard.notices) == 1


def standing(uid: int, what: str = "paused") -> tuple[int, dict[str, Any]]:
    return uid, {"kind": "control", "what": what, "round": 7}


def test_nodes_with_checkpoints_stop_where_all_stand_before_the_same_round() -> None:
    run, _ = local_run(pauses_before_stop=True)
    end = EarlyEnd(run)
    end.stop_once_paused(clock.now() + 1e6)
    assert run.nodes.workers[1].told == [], "nobody asked"
    assert end.stop_after_round() and end.stop_requested
    assert run.nodes.workers[0].told == [OrderRun("meet")] and run.nodes.workers[1].told == []
    end.take_record(*standing(1))
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[1].told == []
    end.take_record(*standing(0))
    end.stop_once_paused(clock.now())
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[0].told == [OrderRun("meet"), StopRun()] and run.nodes.workers[1].told == [StopRun()]


def test_nodes_that_stand_already_are_stopped_without_another_order() -> None:
    run, _ = local_run(pauses_before_stop=True)
    end = EarlyEnd(run)
    for told in (standing(0), standing(0, "resumed"), standing(0), standing(1)):
        end.take_record(*told)
    assert end.stop_after_round()
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[0].told == [StopRun()]


def test_who_does_not_come_to_stand_is_waited_for_some_rounds_and_no_longer() -> None:
    run, _ = local_run(pauses_before_stop=True)
    end, before = EarlyEnd(run), clock.now()
    end.take_record(0, {"kind": "round", "round": 3, "seconds": 100.0})
    end.take_record(1, {"kind": "round", "round": 3, "seconds": 2.0})
    assert end.stop_after_round()
    end.stop_once_paused(before + MEET_SECONDS + MEET_ROUNDS * 100.0 - 1.0)
    assert run.nodes.workers[1].told == []
    end.stop_once_paused(clock.now() + MEET_SECONDS + MEET_ROUNDS * 100.0)
    assert run.nodes.workers[1].told == [StopRun()]


def test_a_node_that_is_lost_is_not_waited_for() -> None:
    run, _ = local_run(pauses_before_stop=True)
    end = EarlyEnd(run)
    run.ledger.lost[1] = Failed(1, 8, "killed", "")
    assert end.stop_after_round()
    end.take_record(*standing(0))
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[0].told == [OrderRun("meet"), StopRun()]
