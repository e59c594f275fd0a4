"""LostNodes decides what the death of a node does to a run; here it decides without processes."""

from __future__ import annotations

import pytest

from decentnode.errors import Diverged, Interrupted, NoGeneration, PeerLost
from decentnode.launch.children.messages import Failed
from decentnode.launch.nodes.node_process import describe_failure
from decentnode.launch.supervising.early_end import EarlyEnd
from decentnode.launch.supervising.lost_nodes import LostNodes
from tests.launch.stand_ins import make_local_run

DEATH = Failed(1, 8, "node 1 was killed", "")


@pytest.mark.parametrize(("phase", "regroup", "exit_code", "continues"), [
    ("running", True, 8, True), ("running", False, 8, False), ("joining", True, 8, False),
    ("running", True, Diverged.exit_code, False),
])  # fmt: skip
def test_the_other_nodes_continue_only_with_regroup_in_a_running_run_and_not_after_divergence(
    phase: str, regroup: bool, exit_code: int, continues: bool
) -> None:
    run, observer = make_local_run(phase, regroup=regroup)
    end = EarlyEnd(run)
    LostNodes(run, end).died(Failed(1, exit_code, "node 1 was killed", ""))
    assert end.kills_soon is not continues and (1 in run.ledger.lost) is continues
    assert observer.notices == (["node 1 was killed: the others continue"] if continues else [])


def test_the_notice_of_a_node_that_lost_its_peers_does_not_say_that_the_others_continue() -> None:
    run, observer = make_local_run(regroup=True)
    LostNodes(run, EarlyEnd(run)).died(Failed(1, PeerLost.exit_code, "node 1: node 2 does not answer", ""))
    assert 1 in run.ledger.lost and observer.notices == ["node 1: node 2 does not answer"]


def test_a_dead_node_is_restarted_as_often_as_allowed_and_its_second_death_does_not_end_the_run() -> None:
    run, observer = make_local_run(regroup=True, restarts=1)
    end = EarlyEnd(run)
    lost_nodes, first = LostNodes(run, end), run.nodes.workers[1]
    lost_nodes.died(DEATH)
    lost_nodes.replace(first)
    second = run.nodes.workers[1]
    assert second is not first and second.uids == (1,)
    lost_nodes.died(Failed(1, Diverged.exit_code, "node 1 diverged", ""))
    lost_nodes.replace(second)
    assert run.nodes.workers[1] is second and not end.kills_soon and run.ledger.restarts == {1: 1}
    assert [text for text in observer.notices if "again" in text] == ["node 1 is started again (1 of 1 times)"]


def test_a_node_is_not_restarted_when_no_member_is_left_or_the_run_is_being_stopped() -> None:
    run, observer = make_local_run(regroup=True, restarts=1)
    lost_nodes, workers = LostNodes(run, EarlyEnd(run)), list(run.nodes.workers)
    for uid, worker in enumerate(workers):
        lost_nodes.died(Failed(uid, 8, f"node {uid} was killed", ""))
        worker.exit_code = -9
    assert lost_nodes.no_member_left
    lost_nodes.replace(workers[0])
    assert run.nodes.workers == workers and "all nodes have died" in observer.notices[-1]


@pytest.mark.parametrize("why", ["signal", "order", "failure"])
def test_a_node_is_not_restarted_by_a_process_end_or_a_fault_once_the_run_ends(why: str) -> None:
    """Its new process, which would hear of neither the stop nor the failure, would be killed as one that stopped
    answering."""
    run, observer = make_local_run(regroup=True, restarts=1)
    end = EarlyEnd(run)
    lost_nodes, workers = LostNodes(run, end), list(run.nodes.workers)
    lost_nodes.died(DEATH)
    if why == "signal":
        run.command.signals.received.append(2)
    elif why == "order":
        end.stop_after_round()
    else:
        lost_nodes.died(Failed(0, Diverged.exit_code, "node 0 diverged", ""))
        assert end.kills_soon
    lost_nodes.replace(workers[1])
    lost_nodes.restart_separately(1)
    lost_nodes.restart_for_fault(1)
    assert run.nodes.workers == workers and run.ledger.restarts == {}
    assert not any("started again" in text for text in observer.notices)


GENERATION = {"kind": "generation", "origin": "ab", "joined": [], "round": 7}


@pytest.mark.parametrize(("members", "node_0_lives", "restarts"), [
    ([0, 2, 3], True, True), ([0, 1, 2], True, False), (None, True, False), ([0, 2, 3], False, False),
])  # fmt: skip
def test_a_node_that_gave_up_is_restarted_if_others_of_its_machine_continue_in_a_newer_generation_without_it(
    members: list[int] | None, node_0_lives: bool, restarts: bool
) -> None:
    run, observer = make_local_run(regroup=True, restarts=2)
    lost_nodes, first = LostNodes(run, EarlyEnd(run)), run.nodes.workers[1]
    if members is not None:
        run.ledger.progress(0, {**GENERATION, "generation": 2, "members": members, "left": []})
    if not node_0_lives:
        lost_nodes.died(Failed(0, 8, "node 0 was killed", ""))
    lost_nodes.died(Failed(1, PeerLost.exit_code, "node 1: no new generation", "", follower=True, gave_up=True))
    lost_nodes.replace(first)
    assert (run.nodes.workers[1] is not first) is restarts and run.ledger.restarts == ({1: 1} if restarts else {})
    assert any("node 1 is not started again" in text for text in observer.notices) is not restarts


def test_interrupting_a_restarted_node_keeps_the_first_reason_of_its_loss() -> None:
    run, _ = make_local_run(regroup=True)
    lost_nodes = LostNodes(run, EarlyEnd(run))
    lost_nodes.died(DEATH)
    lost_nodes.died(Failed(1, Interrupted.exit_code, "stopped", ""))
    assert run.ledger.lost == {1: DEATH}


def test_each_generation_is_reported_once_and_its_members_no_longer_count_as_lost() -> None:
    run, observer = make_local_run(regroup=True)
    lost_nodes = LostNodes(run, EarlyEnd(run))
    lost_nodes.died(DEATH)
    record = {"generation": 2, "origin": "ab", "members": [0, 1], "joined": [1], "left": [], "round": 7}
    lost_nodes.generation(record)
    lost_nodes.generation(record)
    assert observer.notices[1:] == ["generation 2: 2 of 2 nodes continue from round 7, with node 1 again"]
    assert run.ledger.lost == {}


def test_the_failure_report_of_a_node_without_a_generation_says_that_it_gave_up() -> None:
    for error, gave_up in ((NoGeneration("node 1: no new generation"), True), (PeerLost("node 2 is gone"), False)):
        failed = describe_failure(1, error)
        assert (failed.gave_up, failed.follower, failed.exit_code) == (gave_up, True, 5)
