"""Nodes that leave after the last round, ask to join, or stop the run: which nodes count toward the fewest members of a
generation, and which are admitted."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import JoinRefused, Limits
from decentnode.wire.membership import Membership
from decentnode.wire.messages import NO_RUN, PROTOCOL_VERSION, Bye, Denied, Join, Promise, Suspect
from tests.wire.world import RUN, SUSPECT, World


def test_nodes_that_left_after_the_last_round_count_toward_a_generation_without_rounds() -> None:
    world = World(4, min_nodes=3, rounds=7)
    for process in world.processes.values():
        process.membership.position = 7
    for uid in (0, 1, 2):
        world.processes[uid].membership.receive(Bye(RUN, 0, 3), world.now)
    world.kill(3)
    world.kill(2)
    world.run(4 * SUSPECT)
    assert world.generations_by_number[1].members == (0, 1)


def test_after_an_early_end_a_single_remaining_node_may_close_the_run() -> None:
    """Nodes that said goodbye after `last_round` are not suspected, and count toward the closing generation."""
    world = World(4, min_nodes=3, rounds=7)
    for process in world.processes.values():
        process.membership.position = process.membership.last_round = 5
    for uid in (0, 1):
        for source in (2, 3):
            world.processes[uid].membership.receive(Bye(RUN, 0, source), world.now)
    assert all(world.processes[uid].membership.steady for uid in (0, 1))
    world.kill(3)
    world.kill(2)
    world.kill(1)
    world.run(4 * SUSPECT)
    assert world.generations_by_number[1].members == (0,)


def test_a_node_that_says_goodbye_before_the_last_round_counts_for_no_side_of_a_partition() -> None:
    """If both sides of the partition {0, 1} | {2, 3} counted node 4, both would have a majority of five."""
    world = World(5)
    for uid in range(4):
        world.processes[uid].membership.receive(Bye(RUN, 0, 4), world.now)
    world.kill(4)
    world.run(4 * SUSPECT)
    assert world.generations_by_number[1].members == (0, 1, 2, 3)
    assert all(world.processes[uid].membership.departed == {4} for uid in range(4)), "a goodbye is no failure"
    world.cut_off({0, 1})
    world.run(10 * SUSPECT)
    assert len(world.generations_by_number) == 1
    assert all(process.membership.stage != "steady" for process in world.processes.values())


def test_two_of_five_nodes_that_outlast_the_others_begin_no_round() -> None:
    """Three nodes left after the last round (7). They count only for a generation without rounds, and therefore the
    generation of nodes 0 and 1 begins none, though node 1 has not finished its last round."""
    world = World(5, rounds=7)
    for uid, position in ((0, 7), (1, 6)):
        world.processes[uid].membership.position = position
    for source in (2, 3, 4):
        world.processes[0].membership.receive(Bye(RUN, 0, source), world.now)
        world.kill(source)
    world.run(4 * SUSPECT)
    assert world.generations_by_number[1].members == (0, 1)
    assert world.generations_by_number[1].first_round == 7


def test_a_node_that_reports_a_failure_after_its_goodbye_does_not_count_as_finished() -> None:
    world = World(4, rounds=3)
    membership = world.processes[0].membership
    membership.position = 3
    world.deliver(0, Bye(RUN, 0, 3))
    assert membership.left == {3}
    world.deliver(0, Suspect(RUN, 0, 3, to_bitmap([3], 4), 0))
    assert not membership.left
    assert membership.stage != "steady"


def test_once_a_stop_is_requested_nodes_agree_without_a_majority() -> None:
    world = World(5)
    world.run(2)
    for uid in (2, 3, 4):
        world.kill(uid)
    world.run(8 * SUSPECT)
    assert not world.generations_by_number
    world.processes[1].membership.stopping = True
    world.run(6 * SUSPECT)
    assert world.is_settled()
    assert world.generations_by_number[max(world.generations_by_number)].stopping
    assert world.processes[0].membership.stopping


def test_no_node_is_admitted_once_a_stop_was_requested() -> None:
    world = World(4)
    world.run(1)
    for process in world.processes.values():
        process.membership.stopping = True
    world.kill(3)
    world.restart(3)
    world.run(4 * SUSPECT)
    assert world.processes[3].membership.stage == "outside"
    assert all(world.processes[uid].membership.steady for uid in (0, 1, 2))


def test_a_join_with_another_config_is_refused_with_the_reason_on_both_sides() -> None:
    world = World(3)
    with pytest.raises(PeerFault, match=r"wrong_config: node 2 .*digest other, the run has d"):
        world.processes[0].membership.receive(Join(NO_RUN, 0, 2, PROTOCOL_VERSION, "other", 3), world.now)
    assert world.processes[0].membership.steady
    ((to, denied),) = world.processes[0].membership.outbox
    assert to == 2
    joiner = Membership(2, 3, world.limits, draw=os.urandom, digest="other")
    joiner.leave(world.now, "started")
    (event,) = joiner.receive(denied, world.now)
    assert event == JoinRefused(
        "refused by node 0: node 2 asks to join with another config or graph (digest other, the run has d)"
    )
    assert not joiner.receive(Denied(RUN, 0, 1, "d", "what another node asked"), world.now)


def test_a_node_that_asks_to_join_during_a_failed_attempt_is_part_of_the_next_attempt() -> None:
    """Node 3 is the last node with a model. Its first attempt counts node 0 as finished. Then a new process of node 0
    asks to join, so that node 0 no longer counts as finished and the attempt has too few members."""
    world = World(4, rounds=6)
    world.kill(2)
    world.run(4 * SUSPECT)
    for uid in (0, 1):
        world.kill(uid)
    last = world.processes[3].membership
    last.position = 6
    name = last.generation.name
    last.receive(Bye(RUN, name[0], 0, origin=name[1]), world.now)

    def receive_join(source: int) -> None:
        last.receive(Join(RUN, name[0], source, PROTOCOL_VERSION, "d", 4, origin=name[1]), world.now)

    receive_join(1)
    receive_join(0)
    assert last.proposal is not None and last.proposal.members == {1, 3}
    number, origin = last.proposal.name
    last.receive(Promise(RUN, number, 1, 0, 1, 0, origin=origin), world.now)
    assert last.stage == "short" and last.generation.name == name
    receive_join(0)  # a node repeats its request
    assert last.proposal is not None and last.proposal.members == {0, 1, 3}


def test_a_joiner_that_dies_during_its_admission_does_not_count_as_finished() -> None:
    """Node 1 is about to be admitted, fails and is restarted, while the others are past their last round. The leader
    once took its goodbye for that of a finished node, and began one attempt after the other."""
    world = World(5, rounds=20)
    world.kill(1)
    world.run(4 * SUSPECT)
    leader = world.processes[0].membership
    assert leader.generation.members == (0, 2, 3, 4)
    leader.position = 20
    number, origin = leader.generation.name
    leader.receive(Join(RUN, number, 1, PROTOCOL_VERSION, "d", 5, origin=origin), world.now)
    assert leader.proposal is not None and 1 in leader.proposal.members
    attempt = leader.proposal.name
    leader.receive(Bye(RUN, attempt[0], 1, origin=attempt[1]), world.now)  # a guest that had promised
    assert leader.left == set()
    leader.receive(Join(RUN, number, 1, PROTOCOL_VERSION, "d", 5, origin=origin), world.now)
    world.restart(1)
    world.run(8 * SUSPECT)
    assert world.is_settled()
    assert leader.generation.number < 20


def test_a_node_is_never_both_a_joiner_and_a_node_that_left() -> None:
    """The goodbye of node 1's old process arrives after its new process asked to join."""
    world = World(5, rounds=20)
    world.kill(1)
    leader = world.processes[0].membership
    leader.position = 20
    for _ in range(2):
        leader.receive(Join(RUN, 0, 1, PROTOCOL_VERSION, "d", 5), world.now)
        assert leader.joiners == {1} and not leader.left
        leader.suspects.clear()
        leader.receive(Bye(RUN, 0, 1), world.now)
        assert leader.left == {1} and not leader.joiners


def test_late_copies_of_a_join_end_no_generation() -> None:
    """Node 2 is restarted twice. Copies of its requests to join reach every node long after it was admitted."""
    world = World(4)
    for _ in range(2):
        world.kill(2)
        world.run(4 * SUSPECT)
        world.restart(2)
        world.run(3 * SUSPECT)
    assert world.is_settled()
    joins = [message for message in world.sent if isinstance(message, Join)]
    assert joins
    num_broken = [process.num_broken for process in world.processes.values()]
    for message in joins:
        for uid in (0, 1, 3):
            world.deliver(uid, message)
    world.run(4 * SUSPECT)
    assert [process.num_broken for process in world.processes.values()] == num_broken


@pytest.mark.parametrize("length", [511, 512, 513])
def test_the_reason_of_a_refused_join_is_cut_to_the_longest_text_of_a_message(length: int) -> None:
    name, limits = "n" * (length - 1) + "!", Limits(SUSPECT, 20.0, 2)
    member = Membership(0, 3, limits, draw=os.urandom, digest="d", run=RUN, describe=lambda _uid: name)
    with pytest.raises(PeerFault):
        member.receive(Join(NO_RUN, 0, 2, PROTOCOL_VERSION, "other", 3), 100.0)
    ((_, denied),) = member.outbox
    reason = f"{name} asks to join with another config or graph (digest other, the run has d)"
    assert isinstance(denied, Denied) and denied.reason == reason[:512]


def test_a_node_without_which_no_generation_is_possible_is_refused_to_leave() -> None:
    world = World(5, min_nodes=3)
    membership = world.processes[4].membership
    assert membership.refusal_to_leave() == "" == membership.refusal_to_leave([0])
    assert "2 of 5 would be left, and a generation needs 3 nodes (node." in membership.refusal_to_leave([0, 1])
    membership.limits = replace(membership.limits, needed=frozenset({4}))
    assert "no round can begin without the server node 4" in membership.refusal_to_leave()
    membership.stopping = True
    assert membership.refusal_to_leave([0, 1]) == ""
