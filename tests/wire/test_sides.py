"""With `Limits.merges`, all sides of a network partition continue, and merge into one generation when it heals."""

from __future__ import annotations

import os

import pytest

from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import FIRST, new_origin
from decentnode.wire.membership import Membership
from decentnode.wire.membership.sides import FIRST_SECONDS, LONGEST_SECONDS, Sides, decode_names, encode_names
from decentnode.wire.messages import Current, Ping, Prepare
from tests.conftest import scale
from tests.wire.swarm import find_failures
from tests.wire.world import RUN, SUSPECT, World

SHARDS, SCHEDULES = scale(1, 20), scale(100, 1000)


def partitioned_world(num_nodes: int, side: set[int], seconds: float = 10 * SUSPECT) -> World:
    """Returns a world whose nodes trained together for 2 s; then a partition cut off `side` for `seconds`."""
    world = World(num_nodes, merges=True)
    world.run(2.0)
    world.cut_off(side)
    world.run(seconds)
    return world


@pytest.mark.parametrize("side", [{4}, {3, 4}, {0, 1}, {0}, {0, 2, 4}], ids=str)
def test_both_sides_of_a_partition_continue_and_merge_when_it_heals(side: set[int]) -> None:
    world = partitioned_world(5, side)
    others = {*range(5)} - side
    members = {uid: set(process.membership.generation.members) for uid, process in world.processes.items()}
    assert members == {uid: side if uid in side else others for uid in range(5)}
    assert all(process.membership.steady for process in world.processes.values())
    positions = {uid: process.membership.position for uid, process in world.processes.items()}
    before = {uid: process.num_broken for uid, process in world.processes.items()}
    world.broken_links.clear()
    world.run(LONGEST_SECONDS + 4.0)
    assert world.is_settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.members == tuple(range(5)) and generation.merging and not generation.fresh
    assert generation.first_round >= max(positions.values())
    larger = min((side, others), key=lambda uids: (-len(uids), min(uids)))
    assert int.from_bytes(generation.origin[:4], "big") == min(larger), "the larger side's leader proposed it"
    num_broken = {uid: process.num_broken - before[uid] for uid, process in world.processes.items()}
    assert num_broken == dict.fromkeys(range(5), 1), "the merge ended each node's generation once"


def test_three_sides_merge_into_one_generation() -> None:
    world = World(7, merges=True)
    world.run(2.0)
    for side in ({0, 1}, {2, 3, 4}, {5, 6}):
        world.cut_off(side)
    world.run(10 * SUSPECT)
    assert {process.membership.generation.members for process in world.processes.values()} == {
        (0, 1), (2, 3, 4), (5, 6)}  # fmt: skip
    world.broken_links.clear()
    world.run(4 * LONGEST_SECONDS)
    assert world.is_settled()
    assert all(not process.membership.is_guest for process in world.processes.values()), "all models are kept"


def test_a_frozen_node_keeps_its_model_and_merges_when_it_thaws() -> None:
    world = World(4, merges=True)
    world.run(2.0)
    world.freeze(2)
    world.run(10 * SUSPECT)
    world.thaw(2)
    world.run(10 * SUSPECT)
    assert world.is_settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.merging and not generation.fresh


def test_a_restarted_node_is_admitted_without_a_merge() -> None:
    world = World(4, merges=True)
    world.run(2.0)
    world.kill(2)
    world.run(5 * SUSPECT)
    world.restart(2)
    world.run(5 * SUSPECT)
    assert world.is_settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.fresh == {2} and not generation.merging


def test_a_merge_that_a_death_interrupted_is_repeated() -> None:
    """When a member dies, only nodes 0 and 3 have averaged their models: the next generation averages again."""
    world = partitioned_world(5, {3, 4})
    world.broken_links.clear()
    while not world.is_settled():
        world.step()
    for uid, process in world.processes.items():
        process.membership.lineage = process.membership.generation.name if uid in (0, 3) else (1, bytes(12))
    world.members_average = False
    world.kill(4)
    world.run(6 * SUSPECT)
    assert world.is_settled()
    (generation,) = {process.membership.generation for process in world.processes.values()}
    assert generation.members == (0, 1, 2, 3) and generation.merging
    world.members_average = True
    world.run(5.0)
    world.kill(2)
    world.run(6 * SUSPECT)
    assert world.is_settled()
    assert not any(process.membership.generation.merging for process in world.processes.values()), "all have averaged"


def test_sides_do_not_merge_while_one_of_their_nodes_is_unreachable() -> None:
    world = partitioned_world(5, {3, 4})
    world.broken_links = {pair for pair in world.broken_links if 4 in pair}
    before = {uid: process.membership.generation for uid, process in world.processes.items()}
    world.run(20 * SUSPECT)
    assert {uid: process.membership.generation for uid, process in world.processes.items()} == before


def test_a_late_prepare_of_the_other_side_does_not_end_a_generation() -> None:
    """Its leader sent it before it knew that the sides would continue separately; its number is higher than this
    side's."""
    world = partitioned_world(5, {3, 4})
    member = world.processes[1].membership
    number = member.generation.number + 3
    late = Prepare(RUN, number, 3, to_bitmap(range(5), 5), origin=new_origin(3, os.urandom))
    world.deliver(1, late)
    assert member.steady and world.sent[-1] == Current(
        RUN, member.generation.number, 1, to_bitmap([0, 1, 2], 5), 1, number, late.origin,
        origin=member.generation.origin,
    )


def test_a_late_current_that_names_an_older_generation_starts_no_merge() -> None:
    world = partitioned_world(5, {3, 4})
    leader, other = world.processes[0].membership, world.processes[3].membership
    for uid in (3, 4):
        world.deliver(0, Current(RUN, other.generation.number, uid, to_bitmap([3, 4], 5), 1, 0, bytes(12),
                              origin=other.generation.origin))  # fmt: skip
    assert leader.steady, "their messages answer generation 0, which is over"


def test_absent_nodes_are_pinged_less_and_less_often() -> None:
    pings_from: list[int] = []
    """Senders of the pings to node 3."""

    class PingRecorder(World):
        def send_outbox(self, uid: int, membership: Membership) -> None:
            pings_from.extend(uid for to, message in membership.outbox if to == 3 and isinstance(message, Ping))
            super().send_outbox(uid, membership)

    world = PingRecorder(4, merges=True)
    world.cut_off({3})
    world.run(60.0)
    pings_from.clear()
    world.run(20 * LONGEST_SECONDS)
    assert 18 <= len(pings_from) <= 20 and set(pings_from) == {0}, "only the leader pings absent nodes"


def test_a_side_merges_only_whole_smaller_sides_of_which_every_member_answered_lately() -> None:
    sides, name = Sides(2.0), (4, bytes(12))
    sides.begin(0.0)
    assert sides.due == FIRST_SECONDS
    sides.heard(name, frozenset({3, 4}), 3, 1.0)
    assert not dict(sides.mergeable((0, 1, 2), (0, 1, 2))), "node 4 has not answered"
    sides.heard(name, frozenset({3, 4}), 4, 1.5)
    assert dict(sides.mergeable((0, 1, 2), (0, 1, 2))) == {name: {3, 4}}
    assert not dict(sides.mergeable((5,), (5,))), "the smaller side waits for the larger one"
    assert dict(sides.mergeable((0, 1), (0, 1))), "of equal sides the one with the lowest uid merges"
    assert not dict(sides.mergeable((5, 6), (5, 6))), "of equal sides the one with the lowest uid merges"
    sides.heard((5, bytes(12)), frozenset({3}), 3, 1.6)
    assert dict(sides.mergeable((0, 1, 2), (0, 1, 2))) == {(5, bytes(12)): {3}}, "node 3 continued without node 4"
    sides.note_pinged(9.0)
    assert not dict(sides.mergeable((0, 1, 2), (0, 1, 2))), "the answers are too old"
    assert decode_names(encode_names([name, FIRST])) == {name, FIRST} and decode_names(b"xyz") == set()


@pytest.mark.parametrize("number", range(SHARDS))
@pytest.mark.slow
def test_no_random_schedule_with_merges_violates_an_invariant(number: int) -> None:
    assert find_failures(number * SCHEDULES, SCHEDULES, merges=True) == []
