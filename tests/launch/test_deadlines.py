"""Deadlines decides for which nodes a run waits and until when; here it decides without processes."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.errors import AssemblyError, PeerLost
from decentnode.launch.children.messages import Failed
from decentnode.launch.supervising.deadlines import (
    ASSEMBLY_MARGIN_SECONDS,
    EXIT_SECONDS,
    NOTICE_SECONDS,
    REJOIN_SECONDS,
    Deadlines,
)
from decentnode.launch.supervising.early_end import EarlyEnd
from decentnode.launch.supervising.lost_nodes import LostNodes
from tests.launch.facts import FINISHED
from tests.launch.stand_ins import RecordingObserver, make_local_run


def make_deadlines(phase: str, **facts: Any) -> tuple[Deadlines, EarlyEnd, Any, RecordingObserver]:
    """Returns the deadlines of a run, its EarlyEnd, the run itself and its observer."""
    run, observer = make_local_run(phase, **facts)
    end = EarlyEnd(run)
    return Deadlines(run, end, LostNodes(run, end)), end, run, observer


@pytest.mark.parametrize(("phase", "margin"), [("starting", 0.0), ("joining", ASSEMBLY_MARGIN_SECONDS)])
def test_a_start_that_exceeds_its_timeout_fails_and_the_late_node_is_named(phase: str, margin: float) -> None:
    deadlines, end, run, observer = make_deadlines(phase, start_timeout_seconds=60.0)
    run.nodes.workers[0].bound = run.nodes.workers[0].joined = {0}
    deadlines.check(NOTICE_SECONDS + 0.1)
    deadlines.check(NOTICE_SECONDS + 0.2)
    assert len(observer.waits) == 1 and "node 1" in observer.waits[0]
    deadlines.check(60.0 + margin - 0.1)
    assert not end.kills_soon
    deadlines.check(60.0 + margin + 0.1)
    assert [(failure.uid, failure.exit_code) for failure in run.ledger.failures] == [(1, AssemblyError.exit_code)]


@pytest.mark.parametrize("regroup", [False, True])
def test_a_node_silent_after_others_have_finished_fails_the_run_or_with_regroup_is_lost(regroup: bool) -> None:
    deadlines, end, run, _ = make_deadlines("running", regroup=regroup, timeout_seconds=30.0)
    run.nodes.workers[0].finished, run.ledger.finished[0] = {0}, FINISHED
    deadlines.check(1e6)
    assert not end.kills_soon, "no node is known to have finished"
    deadlines.first_finish = 100.0
    deadlines.check(129.0)
    assert not end.kills_soon and not run.ledger.lost
    deadlines.check(131.0)
    failure = run.ledger.lost[1] if regroup else run.ledger.failures[0]
    assert failure.exit_code == PeerLost.exit_code and "node 1: silent for 31 s" in failure.title
    assert end.kills_soon is not regroup and run.nodes.workers[1].killed is regroup


def test_a_finished_run_waits_only_rejoin_seconds_for_a_restarted_node() -> None:
    deadlines, end, run, observer = make_deadlines("running", regroup=True)
    first, second = run.nodes.workers
    first.finished, first.last_message_time, run.ledger.finished[0] = {0}, 100.0, FINISHED
    run.ledger.lost[1] = Failed(1, 8, "node 1 was killed", "")
    deadlines.first_finish = 100.0
    deadlines.check(100.0 + REJOIN_SECONDS)
    assert not second.killed
    deadlines.check(100.1 + REJOIN_SECONDS)
    assert second.killed and not end.kills_soon
    assert observer.notices == ["node 1 was killed; started again, it did not rejoin before the run ended"]


def test_a_process_that_has_not_exited_exit_seconds_after_its_last_message_is_killed() -> None:
    deadlines, _, run, _ = make_deadlines("running")
    worker = run.nodes.workers[0]
    worker.finished, worker.last_message_time = {0}, 50.0
    deadlines.check(50.0 + EXIT_SECONDS)
    assert not worker.killed
    deadlines.check(50.1 + EXIT_SECONDS)
    assert worker.killed and not run.nodes.workers[1].killed


def test_restarted_nodes_end_the_run_when_no_member_is_left_to_admit_them() -> None:
    deadlines, end, run, observer = make_deadlines("running", regroup=True)
    run.ledger.lost |= {uid: Failed(uid, 8, f"node {uid} was killed", "") for uid in (0, 1)}
    deadlines.check(10.0)
    assert not end.kills_soon, "a node may be about to report that it has rejoined"
    run.ledger.lost.pop(1)
    deadlines.check(11.0)
    run.ledger.lost[1] = Failed(1, 8, "node 1 was killed", "")
    deadlines.check(12.0)
    assert not end.kills_soon, "node 1 was back in between, so the wait starts over"
    deadlines.check(13.0)
    assert end.kills_soon and observer.failed_uids == [0]
