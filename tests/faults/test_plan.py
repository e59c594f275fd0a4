"""A list of faults and a seed determine a plan, which every node follows by the time and by its rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from decentnode.errors import UsageError
from decentnode.faults import (
    AnyFault,
    Break,
    Corrupt,
    Drop,
    Fault,
    FaultTimeline,
    Kill,
    MessageFates,
    Slow,
    damaged,
    resolve,
)

NODES, ROUNDS = 8, 50


def parse_fault(**fault: Any) -> AnyFault:
    """Returns the fault of an entry of the config."""
    parsed: AnyFault = TypeAdapter(AnyFault).validate_python(fault)
    return parsed


def test_a_repeated_fault_with_count_1_hits_one_random_node_each_time() -> None:
    fault = parse_fault(do="kill", nodes="all", count=1, every_seconds=10, until_seconds=300)
    plan = resolve([fault], 1, NODES, ROUNDS)
    assert [fault.at_seconds for fault in plan] == [10.0 * i for i in range(1, 31)]
    victims = [fault.nodes for fault in plan if isinstance(fault, Kill)]
    assert all(len(nodes) == 1 and nodes[0] in range(NODES) for nodes in victims) and len(set(victims)) > 3
    assert plan == resolve([fault], 1, NODES, ROUNDS) != resolve([fault], 2, NODES, ROUNDS)


def test_random_choices_of_a_fault_do_not_depend_on_other_faults() -> None:
    fault, other = parse_fault(do="kill", nodes="all", probability=0.1), parse_fault(do="drop", share=0.5)
    assert resolve([fault, other], 3, NODES, ROUNDS)[:-1] == resolve([fault], 3, NODES, ROUNDS)


def test_a_fault_with_a_probability_is_drawn_for_each_round_and_node_independently() -> None:
    plan = resolve([parse_fault(do="slow", nodes=[2, 5], factor=3, seconds=1, probability=0.5)], 1, NODES, 1000)
    by_node = {uid: [fault.at_round for fault in plan if fault.uids == (uid,)] for uid in (2, 5)}
    assert sum(map(len, by_node.values())) == len(plan) and by_node[2] != by_node[5]
    assert all(400 < len(rounds) < 600 for rounds in by_node.values())
    assert not resolve([parse_fault(do="kill", nodes=[1], probability=0.0)], 1, NODES, ROUNDS)
    assert len(resolve([parse_fault(do="kill", nodes=[1], probability=1.0)], 1, NODES, ROUNDS)) == ROUNDS


@pytest.mark.parametrize(("entry", "error"), [
    ({"do": "kill", "nodes": [1], "every_seconds": 5}, "until_seconds"),
    ({"do": "kill", "nodes": [1], "at_round": 5, "until_seconds": 5}, "every_seconds"),
    ({"do": "kill", "nodes": [1], "count": 1, "probability": 0.5}, "either count or probability"),
    ({"do": "kill", "nodes": "some", "at_round": 1}, "all"),
    ({"do": "drop", "at_round": 1, "probability": 0.5}, "either at_seconds or at_round"),
    ({"do": "drop", "share": 1.5}, "share"),
])  # fmt: skip
def test_an_invalid_or_contradictory_fault_is_refused(entry: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        parse_fault(**entry)


@pytest.mark.slow
def test_unknown_nodes_and_too_many_faults_are_refused() -> None:
    with pytest.raises(UsageError, match=r"faults\[1\] must name uids below 8, got 8"):
        cut = parse_fault(do="cut", sides=[[1], [8]], at_round=1, seconds=1)
        resolve([parse_fault(do="drop"), cut], 1, NODES, ROUNDS)
    with pytest.raises(UsageError, match="at most 100,000 faults"):
        resolve([parse_fault(do="kill", nodes="all", probability=1)], 1, NODES, 20_000)


def make_timeline(uid: int, *faults: AnyFault) -> tuple[FaultTimeline, list[int]]:
    """Returns the timeline of a node, and a list to which the index of every fault that begins is appended."""
    began: list[int] = []
    return FaultTimeline(faults, uid, (Fault,), lambda active: began.append(active.index)), began


def test_a_timed_fault_is_in_effect_from_its_time_to_its_end() -> None:
    own, others = Slow(nodes=(1,), at_seconds=2, factor=3, seconds=4), Slow(nodes=(2,), at_seconds=2, factor=3)
    timeline, began = make_timeline(1, own, others)
    assert not timeline.in_effect(1e9)  # the run has not begun
    timeline.begin(100.0, 100.0)
    assert [len(timeline.in_effect(now)) for now in (101.9, 102.0, 105.9, 106.0)] == [0, 1, 1, 0]
    assert began == [0]


def test_a_fault_of_a_round_begins_in_that_round_or_the_next_that_the_node_makes() -> None:
    timeline, began = make_timeline(1, Slow(nodes=(1,), at_round=3, factor=3), Kill(nodes=(1,), at_round=4))
    timeline.begin(0.0, 0.0)
    in_effect = []
    for round in (0, 2, 5):  # the node makes no round 3
        timeline.enter(round, float(round))
        in_effect.append([(active.index, active.until) for active in timeline.in_effect(float(round))])
    assert in_effect == [[], [], [(0, math.inf)]] and began == [0, 1]


def test_a_restarted_process_resumes_only_faults_that_are_still_in_effect() -> None:
    plan = (
        Kill(nodes=(1,), at_round=4), Kill(nodes=(1,), at_round=9), Slow(nodes=(1,), at_round=2, factor=3),
        Slow(nodes=(1,), at_round=2, factor=3, seconds=9), Slow(nodes=(1,), at_seconds=5, factor=2, seconds=10),
        Break(source=1, to=2, at_seconds=5), Slow(nodes=(1,), at_seconds=5, factor=2, seconds=1),
        Break(source=1, to=2, at_seconds=20),
    )  # fmt: skip
    timeline, began = make_timeline(1, *plan)
    timeline.begin(0.0, 12.0, is_restart=True)
    timeline.enter(5, 12.0)
    assert began == [4, 2] and [active.index for active in timeline.in_effect(13.0)] == [4, 2]
    timeline.enter(9, 14.0)
    assert [active.index for active in timeline.in_effect(21.0)] == [2] and began == [4, 2, 1, 7]


def test_the_fate_of_a_message_depends_only_on_seed_connection_and_number() -> None:
    faults = [(0, Drop(share=0.3)), (1, Corrupt(share=0.2, source=(0,), to=(2,), plane="bulk"))]

    def fates(seed: int, to: int, plane: int, count: int = 400) -> list[tuple[bool, float | None]]:
        message_fates = MessageFates(seed)
        drawn = [message_fates.of(faults, 0, to, plane) for _ in range(count)]
        return [(fate.lost, fate.flipped) for fate in drawn]

    assert fates(1, 1, 0) == fates(1, 1, 0) != fates(2, 1, 0) != fates(2, 2, 0)
    assert 80 < sum(lost for lost, _ in fates(1, 1, 0)) < 160
    assert not any(flipped for _, flipped in fates(1, 2, 0) + fates(1, 1, 1))
    flips = [flipped for _, flipped in fates(1, 2, 1) if flipped is not None]
    assert 50 < len(flips) < 110 and all(0 <= position < 1 for position in flips)


@pytest.mark.parametrize("position", [0.0, 0.2, 0.5, 0.99999])
def test_damaged_flips_one_bit_at_the_given_position(position: float) -> None:
    frames = [b"\0" * 3, b"\0" * 7]
    changed = damaged(frames, position)
    assert sum(bin(int.from_bytes(frame, "big")).count("1") for frame in changed) == 1
    assert [len(frame) for frame in changed] == [3, 7] and bool(any(changed[0])) == (position < 0.3)
