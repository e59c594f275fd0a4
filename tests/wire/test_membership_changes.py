"""Nodes that leave after the last round, ask to join, or stop the run: who is counted, and who is let in."""

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


def test_who_said_goodbye_after_the_last_round_is_not_missed() -> None:
    world = World(4, min_nodes=3, rounds=7)
    for process in world.processes.values():
        process.membership.position = 7
    for uid in (0, 1, 2):
        world.processes[uid].membership.receive(Bye(RUN, 0, 3), world.now)
    world.kill(3)
    world.kill(2)
    world.run(4 * SUSPECT)
    assert world.agreed[1].members == (0, 1)


def test_who_said_goodbye_after_an_early_end_is_not_missed() -> None:
    """What is left closes the run, however few they are."""
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
    assert world.agreed[1].members == (0,)


def test_who_says_goodbye_while_there_are_rounds_left_has_failed() -> None:
    """Node 4 may not be counted by both sides of a broken network: neither of two is more than half of five."""
    world = World(5)
    for uid in range(4):
        world.processes[uid].membership.receive(Bye(RUN, 0, 4), world.now)
    world.kill(4)
    world.run(4 * SUSPECT)
    assert world.agreed[1].members == (0, 1, 2, 3)
    assert all(world.processes[uid].membership.departed == {4} for uid in range(4)), "it had not failed"
    world.cut_off({0, 1})
    world.run(10 * SUSPECT)
    assert len(world.agreed) == 1
    assert all(process.membership.stage != "steady" for process in world.processes.values())


def test_the_departed_count_only_for_a_generation_without_rounds() -> None:
    """Two of five are left after the others finished; what they agree on begins no round, though one is behind."""
    world = World(5, rounds=7)
    for uid, position in ((0, 7), (1, 6)):
        world.processes[uid].membership.position = position
    for source in (2, 3, 4):
        world.processes[0].membership.receive(Bye(RUN, 0, source), world.now)
        world.kill(source)
    world.run(4 * SUSPECT)
    assert world.agreed[1].members == (0, 1)
    assert world.agreed[1].first_round == 7


def test_a_goodbye_that_comes_before_the_failure_is_known_does_not_count() -> None:
    world = World(4, rounds=3)
    membership = world.processes[0].membership
    membership.position = 3
    world.take(0, Bye(RUN, 0, 3))
    assert membership.left == {3}
    world.take(0, Suspect(RUN, 0, 3, to_bitmap([3], 4), 0))
    assert not membership.left
    assert membership.stage != "steady"


def test_a_stop_needs_no_majority_and_begins_no_round() -> None:
    world = World(5)
    world.run(2)
    for uid in (2, 3, 4):
        world.kill(uid)
    world.run(8 * SUSPECT)
    assert not world.agreed
    world.processes[1].membership.stopping = True
    world.run(6 * SUSPECT)
    assert world.settled()
    assert world.agreed[max(world.agreed)].stopping
    assert world.processes[0].membership.stopping


def test_nobody_is_let_in_once_a_stop_was_asked_for() -> None:
    world = World(4)
    world.run(1)
    for process in world.processes.values():
        process.membership.stopping = True
    world.kill(3)
    world.restart(3)
    world.run(4 * SUSPECT)
    assert world.processes[3].membership.stage == "outside"
    assert all(world.processes[uid].membership.steady for uid in (0, 1, 2))


def test_a_join_with_another_config_is_refused_by_name_on_both_sides() -> None:
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
    assert not joiner.receive(Denied(RUN, 0, 1, "d", "what another one asked"), world.now)


def test_who_asks_to_join_during_an_attempt_that_falls_short_is_counted_in_the_next() -> None:
    """Node 3 is the last with a model. Its attempt counts on node 0, which has finished, until a new process of it asks
    to join."""
    world = World(4, rounds=6)
    world.kill(2)
    world.run(4 * SUSPECT)
    for uid in (0, 1):
        world.kill(uid)
    last = world.processes[3].membership
    last.position = 6
    now_in, name = last.generation.number, last.generation.name
    last.receive(Bye(RUN, now_in, 0, origin=name[1]), world.now)

    def ask(source: int) -> None:
        last.receive(Join(RUN, now_in, source, PROTOCOL_VERSION, "d", 4, origin=name[1]), world.now)

    ask(1)
    ask(0)
    assert last.proposal is not None and last.proposal.members == {1, 3}
    number, origin = last.proposal.name
    last.receive(Promise(RUN, number, 1, 0, 1, 0, origin=origin), world.now)
    assert last.stage == "short" and last.generation.name == name
    ask(0)  # it goes on asking
    assert last.proposal is not None and last.proposal.members == {0, 1, 3}


def test_a_guest_that_ends_is_no_node_that_has_finished() -> None:
    """Node 1 was about to be let in, fails and is started again, while the others are past their last round: nothing
    makes the leader begin one attempt after the other."""
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
    leader.receive(Bye(RUN, attempt[0], 1, origin=attempt[1]), world.now)  # it had promised
    assert leader.left == set()
    leader.receive(Join(RUN, number, 1, PROTOCOL_VERSION, "d", 5, origin=origin), world.now)
    world.restart(1)
    world.run(8 * SUSPECT)
    assert world.settled()
    assert leader.generation.number < 20


def test_who_left_and_asks_to_join_again_is_one_of_the_two() -> None:
    """The goodbye of node 1's old process comes after the new process asked to join."""
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


def test_late_copies_of_a_join_break_no_generation() -> None:
    """Node 2 comes back twice; what it said from outside arrives again, everywhere, when it is in for long."""
    world = World(4)
    for _ in range(2):
        world.kill(2)
        world.run(4 * SUSPECT)
        world.restart(2)
        world.run(3 * SUSPECT)
    assert world.settled()
    joins = [message for message in world.said if isinstance(message, Join)]
    assert joins
    before = [process.broken for process in world.processes.values()]
    for message in joins:
        for uid in (0, 1, 3):
            world.take(uid, message)
    world.run(4 * SUSPECT)
    assert [process.broken for process in world.processes.values()] == before


@pytest.mark.parametrize("length", [511, 512, 513])
def test_of_a_long_refusal_as_much_is_told_as_a_message_holds(length: int) -> None:
    who = "n" * (length - 1) + "!"
    member = Membership(0, 3, Limits(SUSPECT, 20.0, 2), draw=os.urandom, digest="d", run=RUN, describe=lambda _uid: who)
    with pytest.raises(PeerFault):
        member.receive(Join(NO_RUN, 0, 2, PROTOCOL_VERSION, "other", 3), 100.0)
    ((_, denied),) = member.outbox
    whole = f"{who} asks to join with another config or graph (digest other, the run has d)"
    assert isinstance(denied, Denied) and denied.reason == whole[:512]


def test_a_node_without_which_too_few_are_left_is_told_so() -> None:
    world = World(5, min_nodes=3)
    membership = world.processes[4].membership
    assert membership.refusal_to_leave() == "" == membership.refusal_to_leave([0])
    assert "2 of 5 nodes would be left, and a generation needs 3" in membership.refusal_to_leave([0, 1])
    membership.limits = replace(membership.limits, needed=frozenset({4}))
    assert "no round can begin without the server node 4" in membership.refusal_to_leave()
    membership.stopping = True
    assert membership.refusal_to_leave([0, 1]) == ""
