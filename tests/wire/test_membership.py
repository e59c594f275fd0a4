"""Agreement on generations over a simulated network: members die, freeze, are cut off and come back."""

from __future__ import annotations

import os

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import Broken, Install, new_origin
from decentnode.wire.messages import Bye, Ping, Pong, Prepare, Promise, Suspect
from tests.wire.world import RUN, SUSPECT, TICK, World


def test_nothing_happens_while_everybody_answers() -> None:
    world = World(5)
    world.run(60)
    assert all(p.membership.generation.number == 0 and not p.broken for p in world.processes.values())
    assert {type(m).__name__ for m in world.said} == {"Ping", "Pong"}


@pytest.mark.parametrize("dead", [0, 1, 4])
def test_the_others_go_on_without_a_dead_member(dead: int) -> None:
    world = World(5)
    world.run(5)
    positions = [p.membership.position for uid, p in world.processes.items() if uid != dead]
    world.kill(dead)
    world.run(4 * SUSPECT)
    assert world.settled()
    generation = world.agreed[1]
    assert generation.first_round >= max(positions)
    assert not generation.fresh
    assert all(p.membership.position >= generation.first_round for p in world.processes.values())


def test_a_restarted_member_joins_the_next_generation_as_fresh() -> None:
    world = World(4)
    world.kill(2)
    world.run(4 * SUSPECT)
    world.restart(2)
    world.run(2 * SUSPECT)
    assert world.settled()
    assert world.agreed[2].fresh == {2}


def test_a_quick_restart_is_noticed_though_nobody_missed_the_old_process() -> None:
    world = World(4)
    world.run(2)
    world.kill(0)
    world.restart(0)
    world.run(SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {0}


def test_a_frozen_member_is_left_out_and_comes_back() -> None:
    world = World(5)
    world.freeze(0)
    world.run(4 * SUSPECT)
    assert world.processes[1].membership.generation.members == (1, 2, 3, 4)
    world.thaw(0)
    world.run(3 * SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {0}


def test_a_whole_machine_that_slept_blames_nobody() -> None:
    world = World(3)
    for uid in range(3):
        world.freeze(uid)
    world.run(10 * SUSPECT)
    for uid in range(3):
        world.thaw(uid)
    world.run(3)
    assert world.settled()
    assert world.processes[0].membership.generation.number == 0


def test_too_few_wait_for_more_instead_of_going_on() -> None:
    world = World(4)
    world.kill(2)
    world.kill(3)
    world.run(10 * SUSPECT)
    assert not world.agreed
    assert {p.membership.stage for p in world.processes.values()} <= {"short", "suspecting"}
    assert "needs 3 of 4 nodes" in world.processes[0].membership.reason
    world.restart(3)
    world.run(3 * SUSPECT)
    assert world.settled()
    assert world.agreed[1].fresh == {3}
    assert world.agreed[1].members == (0, 1, 3)


def test_two_nodes_go_on_when_one_is_restarted() -> None:
    world = World(2)
    world.run(5)
    world.kill(0)
    world.run(2 * SUSPECT)
    assert world.processes[1].membership.stage == "short"
    world.restart(0)
    world.run(2 * SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {0}
    assert world.processes[0].going[-1].first_round >= 1


def test_only_the_larger_side_of_a_cut_goes_on_and_the_smaller_comes_back() -> None:
    world = World(5)
    world.cut = {frozenset((a, b)) for a in (0, 1) for b in (2, 3, 4)}
    world.run(12 * SUSPECT)
    assert world.processes[2].membership.generation.members == (2, 3, 4)
    assert world.processes[0].membership.generation.number == 0
    world.cut = set()
    world.run(6 * SUSPECT)
    assert world.settled()


@pytest.mark.slow
def test_two_members_that_cannot_speak_to_each_other_do_not_bring_down_the_rest() -> None:
    world = World(5)
    world.cut = {frozenset((3, 4))}
    steady = 0
    for _ in range(400):
        world.run(2 * TICK)
        membership = world.processes[0].membership
        assert {0, 1, 2} <= set(membership.generation.members)
        steady += membership.steady
    assert steady > 300
    assert membership.generation.number < 30


def test_two_generations_of_one_number_do_not_strand_anybody() -> None:
    """Node 2 promised number 1 to node 0, was started again, forgot it, and promised number 1 to node 1, which with
    other seeds had drawn that number in vain before."""
    world = World(3, seed=2)
    world.run(2)
    world.cut_off({1})
    world.run(6 * SUSPECT)
    assert world.processes[0].membership.generation.members == (0, 2)
    world.kill(2)
    world.cut.clear()
    world.cut_off({0})
    world.run(1)
    world.restart(2)
    world.run(8 * SUSPECT)
    first, second = (world.processes[uid].membership.generation for uid in (0, 1))
    assert (first.number, second.number, second.members) == (1, 1, (1, 2))
    assert first.name != second.name
    world.cut.clear()
    world.run(12 * SUSPECT)
    assert world.settled()


def test_a_survivor_of_a_dead_generation_yields_to_one_of_a_lower_name() -> None:
    """Nodes 0 and 2 agree again and again; then 2 is started again and goes on with 1, which knows of none of that."""
    world = World(3)
    world.cut_off({1})
    for _ in range(3):
        world.run(4 * SUSPECT)
        world.cut.add(frozenset((0, 2)))
        world.run(0.6 * SUSPECT)
        world.processes[0].membership.suspect([2], world.now)
        world.cut.discard(frozenset((0, 2)))
    world.run(4 * SUSPECT)
    world.kill(2)
    world.cut.clear()
    world.cut_off({0})
    world.run(1)
    world.restart(2)
    world.run(8 * SUSPECT)
    survivor, other = world.processes[0].membership.generation, world.processes[1].membership.generation
    assert survivor.name > other.name
    assert other.members == (1, 2)
    world.cut.clear()
    world.run(12 * SUSPECT)
    assert world.settled()


@pytest.mark.parametrize("seed", [0, 1, 5, 8, 12, 18])
def test_two_that_lead_because_they_do_not_hear_each_other_do_not_outbid_each_other_for_ever(seed: int) -> None:
    world = World(7, seed=seed)
    world.run(1)
    world.cut.add(frozenset((0, 2)))
    for uid, missed in ((0, [2]), (2, [0, 1])):
        world._handle(uid, world.processes[uid].membership.suspect(missed, world.now))
    world.kill(1)
    world.processes[0].membership.suspects.add(1)
    world.run(10 * SUSPECT)
    assert len(world.in_force()) == 1
    assert max(process.membership.promised for process in world.processes.values())[0] <= 3


def test_who_failed_while_a_generation_was_agreed_on_is_not_forgotten() -> None:
    """Node 3 fails after everybody promised: it says so to those that follow, then goodbye. It counts for nobody."""
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
            world.take(uid, message)
        assert 3 in membership.failed
        assert 3 not in membership.left and not membership.departed
    world.kill(3)
    world.run(8 * SUSPECT)
    assert world.processes[0].membership.generation.members == (0, 1, 2)
    world.cut_off({0})
    world.run(8 * SUSPECT)
    assert len(world.in_force()) == 0


def test_a_member_that_fails_after_it_got_ready_is_suspected_at_once() -> None:
    world = World(4)
    world.run(1)
    world.kill(3)
    while world.processes[1].membership.stage != "committed":
        world.step()
    membership = world.processes[1].membership
    world.take(1, Suspect(RUN, membership.promised[0], 2, to_bitmap([2], 4), 0, origin=membership.promised[1]))
    world.kill(2)
    while not world.processes[1].going:
        world.step()
    assert 2 in world.processes[1].going[0].members
    assert membership.stage != "steady"


def test_too_few_of_an_older_generation_join_too_few_of_a_newer_one() -> None:
    """Node 4 was cut off; of those that went on without it, two die. Together they are enough."""
    world = World(5)
    world.cut_off({4})
    world.run(6 * SUSPECT)
    assert world.agreed[1].members == (0, 1, 2, 3)
    for uid in (2, 3):
        world.kill(uid)
    world.run(6 * SUSPECT)
    world.cut.clear()
    world.run(8 * SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {4}


def test_a_number_far_ahead_is_refused() -> None:
    """Numbers are finite: one wrong message may not use them up."""
    membership = World(3).processes[0].membership
    with pytest.raises(PeerFault, match="wrong_generation"):
        membership.receive(Promise(RUN, (1 << 32) - 1, 1, 0, 0, 0), 0.0)


def test_who_lives_in_another_generation_is_missed_in_this_one() -> None:
    world = World(3)
    membership = world.processes[0].membership
    since = world.now
    for _ in range(12):
        world.now += TICK
        membership.tick(world.now, [1, 2], since)
        membership.receive(Pong(RUN, 0, 2), world.now)
        membership.receive(Pong(RUN, 0, 1, origin=new_origin(1, os.urandom)), world.now)
    assert membership.suspects == {1}


def test_who_does_not_get_ready_is_left_out() -> None:
    """Node 3 lives and promises, but what it had is never put away."""

    class Stuck(World):
        def _handle(self, uid: int, events: list[object]) -> None:
            super()._handle(uid, [event for event in events if uid != 3 or not isinstance(event, Install)])

    world = Stuck(5)
    world.run(1)
    world.kill(4)
    world.run(60)
    assert any(generation.members == (0, 1, 2) for generation in world.known.values())


def test_a_generation_begins_after_the_furthest_of_its_members() -> None:
    world = World(5)
    world.run(1)
    for uid, position in enumerate((3, 7, 3, 4)):
        world.processes[uid].membership.position = position
    world.random.random = lambda: 0.9  # type: ignore[method-assign]  # nobody turns a round
    world.kill(4)
    world.run(4 * SUSPECT)
    assert world.agreed[1].first_round == 7


def test_a_late_copy_of_a_prepare_does_not_break_what_it_prepared() -> None:
    world = World(4)
    world.run(1)
    world.kill(3)
    world.run(4 * SUSPECT)
    assert world.settled()
    for message in [each for each in world.said if isinstance(each, Prepare)]:
        world.take(1, message)
    assert world.processes[1].membership.steady


def test_who_is_asked_to_promise_ends_its_generation_once() -> None:
    """The training is told that it is over, by the first word that ends it, and not again by those that follow."""
    membership = World(4).processes[1].membership
    words = [Prepare(RUN, number, 0, to_bitmap(range(4), 4), origin=new_origin(0, os.urandom)) for number in (1, 1, 2)]
    events = [membership.receive(word, 100.0) for word in words]
    assert events == [[Broken("node 0 prepares generation 1")], [], []]
    assert membership.stage == "promised" and membership.reason == "node 0 prepares generation 1"


def test_who_misses_somebody_already_keeps_the_reason_when_it_is_asked_to_promise() -> None:
    membership = World(4).processes[1].membership
    assert membership.suspect([3], 100.0) == [Broken("node 3 does not answer")]
    prepare = Prepare(RUN, 1, 0, to_bitmap([0, 1, 2], 4), origin=new_origin(0, os.urandom))
    assert membership.receive(prepare, 100.0) == []
    assert membership.stage == "promised" and membership.reason == "node 3 does not answer"


def test_messages_of_another_run_are_refused() -> None:
    membership = World(3).processes[0].membership
    with pytest.raises(PeerFault, match="wrong_run"):
        membership.receive(Ping(b"anything", 0, 1), 0.0)
    with pytest.raises(PeerFault, match="unknown_uid"):
        membership.receive(Ping(RUN, 0, 3), 0.0)


def test_clients_wait_for_a_server_that_is_gone_and_go_on_once_it_is_back() -> None:
    """They say for whom; a client is done without."""
    world = World(6, needed=[0])
    world.run(5)
    world.kill(0)
    world.run(10 * SUSPECT)
    assert not world.agreed, "most of them are there, but nobody of whom they would get a model"
    told = [p.membership.reason for p in world.processes.values() if p.membership.stage == "short"]
    assert told and all("no round can begin without the server node 0" in text for text in told)
    world.restart(0)
    world.run(4 * SUSPECT)
    assert world.settled() and world.processes[0].going[-1].fresh == {0}
    world.kill(3)
    world.run(4 * SUSPECT)
    assert world.settled() and world.processes[0].membership.generation.members == (0, 1, 2, 4, 5)
