"""For whom a run waits and until when, without one."""

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
from tests.launch.stand_ins import Heard, local_run


def made(phase: str, **facts: Any) -> tuple[Deadlines, EarlyEnd, Any, Heard]:
    """Returns the deadlines of a run, how it ends, the run, and who hears of it."""
    run, heard = local_run(phase, **facts)
    end = EarlyEnd(run)
    return Deadlines(run, end, LostNodes(run, end)), end, run, heard


@pytest.mark.parametrize(("phase", "margin"), [("starting", 0.0), ("joining", ASSEMBLY_MARGIN_SECONDS)])
def test_a_start_takes_no_longer_than_the_config_says_and_names_who_is_late(phase: str, margin: float) -> None:
    deadlines, end, run, heard = made(phase, start_timeout_seconds=60.0)
    run.nodes.workers[0].bound = run.nodes.workers[0].joined = {0}
    deadlines.check(NOTICE_SECONDS + 0.1)
    deadlines.check(NOTICE_SECONDS + 0.2)
    assert len(heard.waits) == 1 and "node 1" in heard.waits[0]
    deadlines.check(60.0 + margin - 0.1)
    assert not end.kills_soon
    deadlines.check(60.0 + margin + 0.1)
    assert [(each.uid, each.exit_code) for each in run.ledger.failures] == [(1, AssemblyError.exit_code)]


@pytest.mark.parametrize("regroup", [False, True])
def test_who_is_silent_after_others_have_finished_fails_the_run_or_is_left_behind(regroup: bool) -> None:
    deadlines, end, run, _ = made("running", regroup=regroup, timeout_seconds=30.0)
    run.nodes.workers[0].finished, run.ledger.finished[0] = {0}, FINISHED
    deadlines.check(1e6)
    assert not end.kills_soon, "nobody is said to have finished"
    deadlines.first_finish = 100.0
    deadlines.check(129.0)
    assert not end.kills_soon and not run.ledger.lost
    deadlines.check(131.0)
    found = run.ledger.lost[1] if regroup else run.ledger.failures[0]
    assert found.exit_code == PeerLost.exit_code and "node 1: silent for 31 s" in found.title
    assert end.kills_soon is not regroup and run.nodes.workers[1].killed is regroup


def test_a_run_that_is_over_waits_a_moment_for_who_is_on_the_way_back() -> None:
    deadlines, end, run, heard = made("running", regroup=True)
    first, second = run.nodes.workers
    first.finished, first.last_message_time, run.ledger.finished[0] = {0}, 100.0, FINISHED
    run.ledger.lost[1] = Failed(1, 8, "node 1 was killed", "")
    deadlines.first_finish = 100.0
    deadlines.check(100.0 + REJOIN_SECONDS)
    assert not second.killed
    deadlines.check(100.1 + REJOIN_SECONDS)
    assert second.killed and not end.kills_soon
    assert heard.notices == ["node 1 was killed; started again, it did not rejoin before the run ended"]


def test_a_process_ends_soon_after_its_last_message() -> None:
    deadlines, _, run, _ = made("running")
    worker = run.nodes.workers[0]
    worker.finished, worker.last_message_time = {0}, 50.0
    deadlines.check(50.0 + EXIT_SECONDS)
    assert not worker.killed
    deadlines.check(50.1 + EXIT_SECONDS)
    assert worker.killed and not run.nodes.workers[1].killed


def test_those_that_were_started_again_end_where_nobody_can_let_them_in() -> None:
    deadlines, end, run, heard = made("running", regroup=True)
    run.ledger.lost |= {uid: Failed(uid, 8, f"node {uid} was killed", "") for uid in (0, 1)}
    deadlines.check(10.0)
    assert not end.kills_soon, "one of them may be about to tell that it is back"
    run.ledger.lost.pop(1)
    deadlines.check(11.0)
    run.ledger.lost[1] = Failed(1, 8, "node 1 was killed", "")
    deadlines.check(12.0)
    assert not end.kills_soon, "the wait begins anew"
    deadlines.check(13.0)
    assert end.kills_soon and heard.causes == [0]
