"""Both sides of a broken network go on, and become one generation once they hear each other."""

from __future__ import annotations

import os

import pytest

from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import FIRST, new_origin
from decentnode.wire.membership import Membership
from decentnode.wire.membership.sides import FIRST_SECONDS, LONGEST_SECONDS, Sides, decode_names, encode_names
from decentnode.wire.messages import Current, Ping, Prepare
from tests.conftest import scale
from tests.wire.swarm import shard
from tests.wire.world import RUN, SUSPECT, World

SHARDS, SCHEDULES = scale(1, 20), scale(100, 1000)


def apart(num_nodes: int, side: set[int], seconds: float = 10 * SUSPECT) -> World:
    """A world whose nodes trained together for a while, and then apart."""
    world = World(num_nodes, merges=True)
    world.run(2.0)
    world.cut_off(side)
    world.run(seconds)
    return world


@pytest.mark.parametrize("side", [{4}, {3, 4}, {0, 1}, {0}, {0, 2, 4}], ids=str)
def test_both_sides_go_on_and_become_one(side: set[int]) -> None:
    world = apart(5, side)
    others = {*range(5)} - side
    found = {uid: set(process.membership.generation.members) for uid, process in world.processes.items()}
    assert found == {uid: side if uid in side else others for uid in range(5)}
    assert all(process.membership.steady for process in world.processes.values())
    positions = {uid: process.membership.position for uid, process in world.processes.items()}
    broken = {uid: process.broken for uid, process in world.processes.items()}
    world.cut.clear()
    world.run(LONGEST_SECONDS + 4.0)
    assert world.settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.members == tuple(range(5)) and generation.merging and not generation.fresh
    assert generation.first_round >= max(positions.values())
    larger = min((side, others), key=lambda each: (-len(each), min(each)))
    assert int.from_bytes(generation.origin[:4], "big") == min(larger), "the larger side's leader proposed it"
    assert {uid: process.broken - broken[uid] for uid, process in world.processes.items()} == dict.fromkeys(range(5), 1)


def test_three_sides_become_one() -> None:
    world = World(7, merges=True)
    world.run(2.0)
    for side in ({0, 1}, {2, 3, 4}, {5, 6}):
        world.cut_off(side)
    world.run(10 * SUSPECT)
    assert {process.membership.generation.members for process in world.processes.values()} == {
        (0, 1), (2, 3, 4), (5, 6)}  # fmt: skip
    world.cut.clear()
    world.run(4 * LONGEST_SECONDS)
    assert world.settled()
    assert all(not process.membership.is_guest for process in world.processes.values()), "all models are kept"


def test_who_was_frozen_keeps_its_model_and_comes_back_with_it() -> None:
    world = World(4, merges=True)
    world.run(2.0)
    world.freeze(2)
    world.run(10 * SUSPECT)
    world.thaw(2)
    world.run(10 * SUSPECT)
    assert world.settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.merging and not generation.fresh


def test_who_was_started_again_is_let_in_without_averaging() -> None:
    world = World(4, merges=True)
    world.run(2.0)
    world.kill(2)
    world.run(5 * SUSPECT)
    world.restart(2)
    world.run(5 * SUSPECT)
    assert world.settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.fresh == {2} and not generation.merging


def test_a_merge_that_was_broken_off_is_made_again() -> None:
    """Some have averaged, some have not, when a member dies: the next generation averages again."""
    world = apart(5, {3, 4})
    world.cut.clear()
    while not world.settled():
        world.step()
    for uid, process in world.processes.items():
        process.membership.lineage = process.membership.generation.name if uid in (0, 3) else (1, bytes(12))
    world.averages = False
    world.kill(4)
    world.run(6 * SUSPECT)
    assert world.settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.members == (0, 1, 2, 3) and generation.merging
    world.averages = True
    world.run(5.0)
    world.kill(2)
    world.run(6 * SUSPECT)
    assert world.settled()
    assert not any(process.membership.generation.merging for process in world.processes.values()), "all have averaged"


def test_half_a_connection_between_sides_merges_nothing() -> None:
    world = apart(5, {3, 4})
    world.cut = {pair for pair in world.cut if 4 in pair}
    before = {uid: process.membership.generation for uid, process in world.processes.items()}
    world.run(20 * SUSPECT)
    assert {uid: process.membership.generation for uid, process in world.processes.items()} == before


def test_a_late_prepare_of_the_other_side_ends_nothing() -> None:
    """Sent before its leader knew that these would go on apart, with a number that is higher than theirs."""
    world = apart(5, {3, 4})
    member = world.processes[1].membership
    number = member.generation.number + 3
    late = Prepare(RUN, number, 3, to_bitmap(range(5), 5), origin=new_origin(3, os.urandom))
    world.take(1, late)
    assert member.steady and world.said[-1] == Current(
        RUN, member.generation.number, 1, to_bitmap([0, 1, 2], 5), 1, number, late.origin,
        origin=member.generation.origin,
    )


def test_a_late_current_of_a_generation_that_is_over_merges_nothing() -> None:
    world = apart(5, {3, 4})
    leader, other = world.processes[0].membership, world.processes[3].membership
    for uid in (3, 4):
        world.take(0, Current(RUN, other.generation.number, uid, to_bitmap([3, 4], 5), 1, 0, bytes(12),
                              origin=other.generation.origin))  # fmt: skip
    assert leader.steady, "they spoke of the generation before"


def test_absent_nodes_are_pinged_less_and_less_often() -> None:
    pinged: list[int] = []

    class Counting(World):
        def send(self, uid: int, membership: Membership) -> None:
            pinged.extend(uid for to, message in membership.outbox if to == 3 and isinstance(message, Ping))
            super().send(uid, membership)

    world = Counting(4, merges=True)
    world.cut_off({3})
    world.run(60.0)
    pinged.clear()
    world.run(20 * LONGEST_SECONDS)
    assert 18 <= len(pinged) <= 20 and set(pinged) == {0}, "by the one that leads"


def test_sides() -> None:
    sides, name = Sides(2.0), (4, bytes(12))
    sides.begin(0.0)
    assert sides.due == FIRST_SECONDS
    sides.heard(name, frozenset({3, 4}), 3, 1.0)
    assert not dict(sides.mergeable((0, 1, 2), (0, 1, 2))), "node 4 has not answered"
    sides.heard(name, frozenset({3, 4}), 4, 1.5)
    assert dict(sides.mergeable((0, 1, 2), (0, 1, 2))) == {name: {3, 4}}
    assert not dict(sides.mergeable((5,), (5,))), "the smaller one waits to be taken in"
    assert dict(sides.mergeable((0, 1), (0, 1))) and not dict(sides.mergeable((5, 6), (5, 6))), "by the lowest uid"
    sides.heard((5, bytes(12)), frozenset({3}), 3, 1.6)
    assert dict(sides.mergeable((0, 1, 2), (0, 1, 2))) == {(5, bytes(12)): {3}}, "node 3 has left node 4"
    sides.note_pinged(9.0)
    assert not dict(sides.mergeable((0, 1, 2), (0, 1, 2))), "what was said long ago"
    assert decode_names(encode_names([name, FIRST])) == {name, FIRST} and decode_names(b"xyz") == set()


@pytest.mark.parametrize("number", range(SHARDS))
@pytest.mark.slow
def test_all_that_live_come_together_in_the_end(number: int) -> None:
    assert shard(number * SCHEDULES, SCHEDULES, merges=True) == []
