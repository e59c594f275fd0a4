"""What the death of a node means to a run, without one."""

from __future__ import annotations

import pytest

from decentnode.errors import Diverged, Interrupted, NoGeneration, PeerLost
from decentnode.launch.children.messages import Failed
from decentnode.launch.nodes.node_process import describe_failure
from decentnode.launch.supervising.early_end import EarlyEnd
from decentnode.launch.supervising.lost_nodes import LostNodes
from tests.launch.stand_ins import local_run

DEATH = Failed(1, 8, "node 1 was killed", "")


@pytest.mark.parametrize(("phase", "regroup", "exit_code", "goes_on"), [
    ("running", True, 8, True), ("running", False, 8, False), ("joining", True, 8, False),
    ("running", True, Diverged.exit_code, False),
])  # fmt: skip
def test_the_others_go_on_where_the_config_allows_it(
    phase: str, regroup: bool, exit_code: int, goes_on: bool
) -> None:
    run, heard = local_run(phase, regroup=regroup)
    end = EarlyEnd(run)
    LostNodes(run, end).died(Failed(1, exit_code, "node 1 was killed", ""))
    assert end.kills_soon is not goes_on and (1 in run.ledger.lost) is goes_on
    assert heard.notices == (["node 1 was killed: the others continue"] if goes_on else [])


def test_of_a_node_that_misses_the_others_nobody_claims_that_they_go_on() -> None:
    run, heard = local_run(regroup=True)
    LostNodes(run, EarlyEnd(run)).died(Failed(1, PeerLost.exit_code, "node 1: node 2 does not answer", ""))
    assert 1 in run.ledger.lost and heard.notices == ["node 1: node 2 does not answer"]


def test_nodes_on_their_way_back_end_nothing_and_are_started_again_as_often_as_allowed() -> None:
    run, heard = local_run(regroup=True, restarts=1)
    end = EarlyEnd(run)
    losses, first = LostNodes(run, end), run.nodes.workers[1]
    losses.died(DEATH)
    losses.replace(first)
    second = run.nodes.workers[1]
    assert second is not first and second.uids == (1,)
    losses.died(Failed(1, Diverged.exit_code, "node 1 diverged", ""))
    losses.replace(second)
    assert run.nodes.workers[1] is second and not end.kills_soon and run.ledger.restarts == {1: 1}
    assert [text for text in heard.notices if "again" in text] == ["node 1 is started again (1 of 1 times)"]


def test_nobody_is_started_again_where_none_is_left_to_let_them_in_or_the_run_ends() -> None:
    run, heard = local_run(regroup=True, restarts=1)
    losses, workers = LostNodes(run, EarlyEnd(run)), list(run.nodes.workers)
    for uid, worker in enumerate(workers):
        losses.died(Failed(uid, 8, f"node {uid} was killed", ""))
        worker.exit_code = -9
    assert losses.no_member_left
    losses.replace(workers[0])
    assert run.nodes.workers == workers and "all nodes have died" in heard.notices[-1]

    run, _ = local_run(regroup=True, restarts=1)
    losses, workers = LostNodes(run, EarlyEnd(run)), list(run.nodes.workers)
    losses.died(DEATH)
    run.command.signals.received.append(2)
    losses.replace(workers[1])
    assert run.nodes.workers == workers


GENERATION = {"kind": "generation", "origin": "ab", "joined": [], "round": 7}


@pytest.mark.parametrize(("members", "present", "again"), [
    ([0, 2, 3], True, True), ([0, 1, 2], True, False), (None, True, False), ([0, 2, 3], False, False),
])  # fmt: skip
def test_who_gave_up_is_started_again_where_others_of_the_machine_are_known_to_go_on(
    members: list[int] | None, present: bool, again: bool
) -> None:
    run, heard = local_run(regroup=True, restarts=2)
    losses, first = LostNodes(run, EarlyEnd(run)), run.nodes.workers[1]
    if members is not None:
        run.ledger.progress(0, {**GENERATION, "generation": 2, "members": members, "left": []})
    if not present:
        losses.died(Failed(0, 8, "node 0 was killed", ""))
    losses.died(Failed(1, PeerLost.exit_code, "node 1: no new generation", "", follower=True, gave_up=True))
    losses.replace(first)
    assert (run.nodes.workers[1] is not first) is again and run.ledger.restarts == ({1: 1} if again else {})
    assert any("node 1 is not started again" in text for text in heard.notices) is not again


def test_a_stop_on_the_way_back_keeps_why_the_node_was_lost() -> None:
    run, _ = local_run(regroup=True)
    losses = LostNodes(run, EarlyEnd(run))
    losses.died(DEATH)
    losses.died(Failed(1, Interrupted.exit_code, "stopped", ""))
    assert run.ledger.lost == {1: DEATH}


def test_the_user_hears_of_each_generation_once_and_who_is_in_it_is_not_lost() -> None:
    run, heard = local_run(regroup=True)
    losses = LostNodes(run, EarlyEnd(run))
    losses.died(DEATH)
    record = {"generation": 2, "origin": "ab", "members": [0, 1], "joined": [1], "left": [], "round": 7}
    losses.generation(record)
    losses.generation(record)
    assert heard.notices[1:] == ["generation 2: 2 of 2 nodes continue from round 7, with node 1 again"]
    assert run.ledger.lost == {}


def test_a_report_says_that_a_node_gave_up() -> None:
    for error, gave_up in ((NoGeneration("node 1: no new generation"), True), (PeerLost("node 2 is gone"), False)):
        failed = describe_failure(1, error)
        assert (failed.gave_up, failed.follower, failed.exit_code) == (gave_up, True, 5)
