"""EarlyEnd decides what a failure, a signal or an order to stop does to a run; here it decides without processes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from decentnode import clock
from decentnode.launch.children.messages import Failed, OrderRun, PeerFailure, StopRun
from decentnode.launch.supervising.early_end import CAUSE_WAIT_SECONDS, GRACE_SECONDS, EarlyEnd
from decentnode.wire.orders import MEET_ROUNDS, MEET_SECONDS
from tests.launch.stand_ins import make_local_run


def test_the_failure_that_others_follow_from_is_reported_as_the_cause() -> None:
    run, observer = make_local_run()
    end = EarlyEnd(run)
    end.fail(Failed(1, 5, "nothing from node 0", "", follower=True))
    assert end.kills_soon and observer.failed_uids == [], "this failure may follow from another one"
    end.fail(Failed(0, 8, "a bug", ""))
    end.report_cause()
    assert observer.failed_uids == [0], "the cause is reported once"
    assert run.nodes.workers[0].sent == [PeerFailure(1, "nothing from node 0", ends_run=True)], "the first is passed on"


def test_nodes_that_do_not_end_within_the_grace_time_are_killed_and_listed_as_silent() -> None:
    run, observer = make_local_run()
    end = EarlyEnd(run)
    end.tick(clock.now() + 1e6)
    assert not any(worker.killed for worker in run.nodes.workers), "nothing has failed"
    before = clock.now()
    end.fail(Failed(1, 5, "nothing from node 0", "", follower=True))
    end.tick(before + CAUSE_WAIT_SECONDS + 0.5)
    assert observer.failed_uids == [1] and end.silent == []
    run.nodes.workers[1].failed = {1}
    end.tick(clock.now() + GRACE_SECONDS)
    assert all(worker.killed for worker in run.nodes.workers) and end.silent == [0]


def test_after_a_failure_no_fault_is_injected_and_suspended_nodes_are_resumed_so_that_they_can_end() -> None:
    run, _ = make_local_run()
    stops: list[None] = []
    run.process_faults.stop = lambda: stops.append(None)
    EarlyEnd(run).fail(Failed(1, 8, "a bug", ""))
    assert stops


@pytest.mark.parametrize(("phase", "count", "killed"), [
    ("starting", 1, True), ("joining", 1, True), ("running", 1, False), ("running", 2, True),
])  # fmt: skip
def test_only_a_single_signal_to_a_running_run_stops_it_without_a_kill(
    phase: str, count: int, killed: bool
) -> None:
    run, _ = make_local_run(phase)
    end = EarlyEnd(run)
    received: Any = run.command.signals.received
    received += [signal.SIGINT] * count
    end.handle_signals()
    assert (end.killed_by_user, end.kills_soon) == (killed, killed)
    assert (run.nodes.workers[0].sent == [StopRun()]) == (phase == "running")
    end.tick(clock.now())
    assert end.silent == [], "after a kill by the user no node counts as silent"


def test_an_order_to_stop_is_obeyed_once() -> None:
    run, observer = make_local_run()
    end = EarlyEnd(run)
    assert end.stop_after_round() and not end.stop_after_round()
    assert run.nodes.workers[1].sent == [StopRun()] and len(observer.notices) == 1


def control_record(uid: int, what: str = "paused") -> tuple[int, dict[str, Any]]:
    return uid, {"kind": "control", "what": what, "round": 7}


def test_nodes_with_checkpoints_are_stopped_once_all_pause_before_the_same_round() -> None:
    run, _ = make_local_run(pauses_before_stop=True)
    end = EarlyEnd(run)
    end.stop_once_paused(clock.now() + 1e6)
    assert run.nodes.workers[1].sent == [], "no stop was requested"
    assert end.stop_after_round() and end.stop_requested
    assert run.nodes.workers[0].sent == [OrderRun("meet")] and run.nodes.workers[1].sent == []
    end.take_record(*control_record(1))
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[1].sent == []
    end.take_record(*control_record(0))
    end.stop_once_paused(clock.now())
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[0].sent == [OrderRun("meet"), StopRun()] and run.nodes.workers[1].sent == [StopRun()]


def test_nodes_that_have_paused_already_are_stopped_without_an_order_to_meet() -> None:
    run, _ = make_local_run(pauses_before_stop=True)
    end = EarlyEnd(run)
    for record in (control_record(0), control_record(0, "resumed"), control_record(0), control_record(1)):
        end.take_record(*record)
    assert end.stop_after_round()
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[0].sent == [StopRun()]


def test_nodes_that_do_not_pause_are_stopped_after_the_time_of_a_few_rounds() -> None:
    run, _ = make_local_run(pauses_before_stop=True)
    end, before = EarlyEnd(run), clock.now()
    end.take_record(0, {"kind": "round", "round": 3, "seconds": 100.0})
    end.take_record(1, {"kind": "round", "round": 3, "seconds": 2.0})
    assert end.stop_after_round()
    end.stop_once_paused(before + MEET_SECONDS + MEET_ROUNDS * 100.0 - 1.0)
    assert run.nodes.workers[1].sent == []
    end.stop_once_paused(clock.now() + MEET_SECONDS + MEET_ROUNDS * 100.0)
    assert run.nodes.workers[1].sent == [StopRun()]


def test_a_stop_does_not_wait_for_a_lost_node_to_pause() -> None:
    run, _ = make_local_run(pauses_before_stop=True)
    end = EarlyEnd(run)
    run.ledger.lost[1] = Failed(1, 8, "killed", "")
    assert end.stop_after_round()
    end.take_record(*control_record(0))
    end.stop_once_paused(clock.now())
    assert run.nodes.workers[0].sent == [OrderRun("meet"), StopRun()]
