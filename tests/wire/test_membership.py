"""Agreement on generations over a simulated network: members die, freeze, are cut off and come back."""

from __future__ import annotations

import os

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import Broken, Install, new_origin
from decentnode.wire.messages import Bye, Ping, Pong, Prepare, Promise, Suspect
from tests.wire.world import RUN, SUSPECT, TICK, World


def test_members_that_all_answer_exchange_only_pings() -> None:
    world = World(5)
    world.run(60)
    assert all(p.membership.generation.number == 0 and not p.num_broken for p in world.processes.values())
    assert {type(m).__name__ for m in world.sent} == {"Ping", "Pong"}


@pytest.mark.parametrize("dead", [0, 1, 4])
def test_survivors_form_a_new_generation_without_a_dead_member(dead: int) -> None:
    world = World(5)
    world.run(5)
    positions = [p.membership.position for uid, p in world.processes.items() if uid != dead]
    world.kill(dead)
    world.run(4 * SUSPECT)
    assert world.is_settled()
    generation = world.generations_by_number[1]
    assert generation.first_round >= max(positions)
    assert not generation.fresh
    assert all(p.membership.position >= generation.first_round for p in world.processes.values())


def test_a_restarted_member_joins_the_next_generation_as_fresh() -> None:
    world = World(4)
    world.kill(2)
    world.run(4 * SUSPECT)
    world.restart(2)
    world.run(2 * SUSPECT)
    assert world.is_settled()
    assert world.generations_by_number[2].fresh == {2}


def test_a_restart_quicker_than_any_suspicion_is_noticed() -> None:
    world = World(4)
    world.run(2)
    world.kill(0)
    world.restart(0)
    world.run(SUSPECT)
    assert world.is_settled()
    assert world.processes[0].entered[-1].fresh == {0}


def test_a_frozen_member_is_left_out_and_rejoins_when_it_thaws() -> None:
    world = World(5)
    world.freeze(0)
    world.run(4 * SUSPECT)
    assert world.processes[1].membership.generation.members == (1, 2, 3, 4)
    world.thaw(0)
    world.run(3 * SUSPECT)
    assert world.is_settled()
    assert world.processes[0].entered[-1].fresh == {0}


def test_nodes_suspect_no_one_after_their_whole_machine_was_suspended() -> None:
    world = World(3)
    for uid in range(3):
        world.freeze(uid)
    world.run(10 * SUSPECT)
    for uid in range(3):
        world.thaw(uid)
    world.run(3)
    assert world.is_settled()
    assert world.processes[0].membership.generation.number == 0


def test_survivors_short_of_a_majority_wait_until_a_node_is_restarted() -> None:
    world = World(4)
    world.kill(2)
    world.kill(3)
    world.run(10 * SUSPECT)
    assert not world.generations_by_number
    assert {p.membership.stage for p in world.processes.values()} <= {"short", "suspecting"}
    assert "needs 3 of 4 nodes" in world.processes[0].membership.reason
    world.restart(3)
    world.run(3 * SUSPECT)
    assert world.is_settled()
    assert world.generations_by_number[1].fresh == {3}
    assert world.generations_by_number[1].members == (0, 1, 3)


def test_a_run_of_two_nodes_continues_after_one_is_restarted() -> None:
    world = World(2)
    world.run(5)
    world.kill(0)
    world.run(2 * SUSPECT)
    assert world.processes[1].membership.stage == "short"
    world.restart(0)
    world.run(2 * SUSPECT)
    assert world.is_settled()
    assert world.processes[0].entered[-1].fresh == {0}
    assert world.processes[0].entered[-1].first_round >= 1


def test_only_the_larger_side_of_a_partition_continues_and_the_smaller_rejoins() -> None:
    world = World(5)
    world.broken_links = {frozenset((a, b)) for a in (0, 1) for b in (2, 3, 4)}
    world.run(12 * SUSPECT)
    assert world.processes[2].membership.generation.members == (2, 3, 4)
    assert world.processes[0].membership.generation.number == 0
    world.broken_links = set()
    world.run(6 * SUSPECT)
    assert world.is_settled()


@pytest.mark.slow
def test_a_broken_link_between_two_members_does_not_stop_the_others() -> None:
    world = World(5)
    world.broken_links = {frozenset((3, 4))}
    steady_looks = 0
    for _ in range(400):
        world.run(2 * TICK)
        membership = world.processes[0].membership
        assert {0, 1, 2} <= set(membership.generation.members)
        steady_looks += membership.steady
    assert steady_looks > 300
    assert membership.generation.number < 30


def test_two_generations_with_the_same_number_still_become_one() -> None:
    """Node 2 promises number 1 to node 0, is restarted, has forgotten that, and promises number 1 to node 1. With other
    seeds node 1 has already used number 1 for an attempt that failed."""
    world = World(3, seed=2)
    world.run(2)
    world.cut_off({1})
    world.run(6 * SUSPECT)
    assert world.processes[0].membership.generation.members == (0, 2)
    world.kill(2)
    world.broken_links.clear()
    world.cut_off({0})
    world.run(1)
    world.restart(2)
    world.run(8 * SUSPECT)
    first, second = (world.processes[uid].membership.generation for uid in (0, 1))
    assert (first.number, second.number, second.members) == (1, 1, (1, 2))
    assert first.name != second.name
    world.broken_links.clear()
    world.run(12 * SUSPECT)
    assert world.is_settled()


def test_a_survivor_of_a_lost_generation_joins_a_generation_with_a_lower_name() -> None:
    """Nodes 0 and 2 agree on several generations. Then node 2 is restarted, has forgotten them, and continues with node
    1, which never heard of them, so that the name of their generation is lower than that of node 0's."""
    world = World(3)
    world.cut_off({1})
    for _ in range(3):
        world.run(4 * SUSPECT)
        world.broken_links.add(frozenset((0, 2)))
        world.run(0.6 * SUSPECT)
        world.processes[0].membership.suspect([2], world.now)
        world.broken_links.discard(frozenset((0, 2)))
    world.run(4 * SUSPECT)
    world.kill(2)
    world.broken_links.clear()
    world.cut_off({0})
    world.run(1)
    world.restart(2)
    world.run(8 * SUSPECT)
    survivor, other = world.processes[0].membership.generation, world.processes[1].membership.generation
    assert survivor.name > other.name
    assert other.members == (1, 2)
    world.broken_links.clear()
    world.run(12 * SUSPECT)
    assert world.is_settled()


@pytest.mark.parametrize("seed", [0, 1, 5, 8, 12, 18])
def test_two_leaders_that_cannot_reach_each_other_stop_outbidding_each_other(seed: int) -> None:
    world = World(7, seed=seed)
    world.run(1)
    world.broken_links.add(frozenset((0, 2)))
    for uid, missed in ((0, [2]), (2, [0, 1])):
        world.handle_events(uid, world.processes[uid].membership.suspect(missed, world.now))
    world.kill(1)
    world.processes[0].membership.suspects.add(1)
    world.run(10 * SUSPECT)
    assert len(world.generations_in_force()) == 1
    assert max(process.membership.promised for process in world.processes.values())[0] <= 3


def test_a_failure_reported_during_an_agreement_is_remembered() -> None:
    """Node 3 fails after all members have promised: it tells the followers and says goodbye. It may not be counted as a
    node that has finished, by either side of a later partition."""
    world = World(5)
    world.run(2)
    world.kill(4)
    for _ in range(400):
        world.step()
        if any(world.processes[uid].membership.stage == "promised" for uid in (1, 2)):
            break
    for uid in (0, 1, 2):
        membership = world.processes[uid].membership
        for message in (Suspect(RUN, 0, 3, to_bitmap([3], 5), 0), Bye(RUN, 0, 3)):
            world.deliver(uid, message)
        assert 3 in membership.failed
        assert 3 not in membership.left and not membership.departed
    world.kill(3)
    world.run(8 * SUSPECT)
    assert world.processes[0].membership.generation.members == (0, 1, 2)
    world.cut_off({0})
    world.run(8 * SUSPECT)
    assert len(world.generations_in_force()) == 0


def test_a_member_that_fails_after_it_got_ready_is_suspected_at_once() -> None:
    world = World(4)
    world.run(1)
    world.kill(3)
    while world.processes[1].membership.stage != "committed":
        world.step()
    membership = world.processes[1].membership
    world.deliver(1, Suspect(RUN, membership.promised[0], 2, to_bitmap([2], 4), 0, origin=membership.promised[1]))
    world.kill(2)
    while not world.processes[1].entered:
        world.step()
    assert 2 in world.processes[1].entered[0].members
    assert membership.stage != "steady"


def test_a_node_of_an_older_generation_completes_a_newer_one_that_is_short_of_members() -> None:
    """Node 4 is cut off, and two of the four nodes that continue without it die. With node 4 the survivors are a
    majority again."""
    world = World(5)
    world.cut_off({4})
    world.run(6 * SUSPECT)
    assert world.generations_by_number[1].members == (0, 1, 2, 3)
    for uid in (2, 3):
        world.kill(uid)
    world.run(6 * SUSPECT)
    world.broken_links.clear()
    world.run(8 * SUSPECT)
    assert world.is_settled()
    assert world.processes[0].entered[-1].fresh == {4}


def test_a_generation_number_far_ahead_is_refused() -> None:
    """Generation numbers are finite: a single wrong message must not use them up."""
    membership = World(3).processes[0].membership
    with pytest.raises(PeerFault, match="wrong_generation"):
        membership.receive(Promise(RUN, (1 << 32) - 1, 1, 0, 0, 0), 0.0)


def test_a_node_that_answers_from_another_generation_is_suspected() -> None:
    world = World(3)
    membership = world.processes[0].membership
    since = world.now
    for _ in range(12):
        world.now += TICK
        membership.tick(world.now, [1, 2], since)
        membership.receive(Pong(RUN, 0, 2), world.now)
        membership.receive(Pong(RUN, 0, 1, origin=new_origin(1, os.urandom)), world.now)
    assert membership.suspects == {1}


def test_a_member_that_never_gets_ready_is_left_out() -> None:
    """Node 3 answers and promises, but never releases the resources of the old generation."""

    class WorldWithStuckNode(World):
        def handle_events(self, uid: int, events: list[object]) -> None:
            super().handle_events(uid, [event for event in events if uid != 3 or not isinstance(event, Install)])

    world = WorldWithStuckNode(5)
    world.run(1)
    world.kill(4)
    world.run(60)
    assert any(generation.members == (0, 1, 2) for generation in world.generations_by_name.values())


def test_a_generation_begins_at_the_highest_round_of_its_members() -> None:
    world = World(5)
    world.run(1)
    for uid, position in enumerate((3, 7, 3, 4)):
        world.processes[uid].membership.position = position
    world.random.random = lambda: 0.9  # type: ignore[method-assign]  # no node completes a round
    world.kill(4)
    world.run(4 * SUSPECT)
    assert world.generations_by_number[1].first_round == 7


def test_a_late_copy_of_a_prepare_does_not_end_the_generation_it_prepared() -> None:
    world = World(4)
    world.run(1)
    world.kill(3)
    world.run(4 * SUSPECT)
    assert world.is_settled()
    for message in [message for message in world.sent if isinstance(message, Prepare)]:
        world.deliver(1, message)
    assert world.processes[1].membership.steady


def test_only_the_first_prepare_tells_the_owner_that_its_generation_ended() -> None:
    membership = World(4).processes[1].membership
    prepares = [
        Prepare(RUN, number, 0, to_bitmap(range(4), 4), origin=new_origin(0, os.urandom)) for number in (1, 1, 2)
    ]
    events = [membership.receive(prepare, 100.0) for prepare in prepares]
    assert events == [[Broken("node 0 prepares generation 1")], [], []]
    assert membership.stage == "promised" and membership.reason == "node 0 prepares generation 1"


def test_a_node_that_suspects_a_member_keeps_that_reason_when_a_prepare_arrives() -> None:
    membership = World(4).processes[1].membership
    assert membership.suspect([3], 100.0) == [Broken("node 3 does not answer")]
    prepare = Prepare(RUN, 1, 0, to_bitmap([0, 1, 2], 4), origin=new_origin(0, os.urandom))
    assert membership.receive(prepare, 100.0) == []
    assert membership.stage == "promised" and membership.reason == "node 3 does not answer"


def test_messages_of_another_run_or_an_unknown_node_are_refused() -> None:
    membership = World(3).processes[0].membership
    with pytest.raises(PeerFault, match="wrong_run"):
        membership.receive(Ping(b"anything", 0, 1), 0.0)
    with pytest.raises(PeerFault, match="unknown_uid"):
        membership.receive(Ping(RUN, 0, 3), 0.0)


def test_clients_wait_for_a_dead_server_and_continue_without_a_dead_client() -> None:
    """While they wait, their reason names the server. Node 0 is the server (`Limits.needed`)."""
    world = World(6, needed=[0])
    world.run(5)
    world.kill(0)
    world.run(10 * SUSPECT)
    assert not world.generations_by_number, "a majority is left, but the server, from which they get the model, is not"
    reasons = [p.membership.reason for p in world.processes.values() if p.membership.stage == "short"]
    assert reasons and all("no round can begin without the server node 0" in reason for reason in reasons)
    world.restart(0)
    world.run(4 * SUSPECT)
    assert world.is_settled() and world.processes[0].entered[-1].fresh == {0}
    world.kill(3)
    world.run(4 * SUSPECT)
    assert world.is_settled() and world.processes[0].membership.generation.members == (0, 1, 2, 4, 5)
