"""A list of faults comes to one plan for one seed, and each node follows it by the time and its rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from decentnode.errors import UsageError
from decentnode.faults import AnyFault, Break, Corrupt, Course, Drop, Fault, Kill, MessageFates, Slow, damaged, resolve

NODES, ROUNDS = 8, 50


def read(**fault: Any) -> AnyFault:
    found: AnyFault = TypeAdapter(AnyFault).validate_python(fault)
    return found


def test_one_random_node_every_ten_seconds() -> None:
    fault = read(do="kill", nodes="all", count=1, every_seconds=10, until_seconds=300)
    plan = resolve([fault], 1, NODES, ROUNDS)
    assert [each.at_seconds for each in plan] == [10.0 * i for i in range(1, 31)]
    struck = [each.nodes for each in plan if isinstance(each, Kill)]
    assert all(len(nodes) == 1 and nodes[0] in range(NODES) for nodes in struck) and len(set(struck)) > 3
    assert plan == resolve([fault], 1, NODES, ROUNDS) != resolve([fault], 2, NODES, ROUNDS)


def test_what_is_drawn_for_one_fault_does_not_depend_on_the_others() -> None:
    fault, other = read(do="kill", nodes="all", probability=0.1), read(do="drop", share=0.5)
    assert resolve([fault, other], 3, NODES, ROUNDS)[:-1] == resolve([fault], 3, NODES, ROUNDS)


def test_by_chance_in_each_round_and_for_each_node_by_itself() -> None:
    plan = resolve([read(do="slow", nodes=[2, 5], factor=3, seconds=1, probability=0.5)], 1, NODES, 1000)
    by_node = {uid: [each.at_round for each in plan if each.uids == (uid,)] for uid in (2, 5)}
    assert sum(map(len, by_node.values())) == len(plan) and by_node[2] != by_node[5]
    assert all(400 < len(rounds) < 600 for rounds in by_node.values())
    assert not resolve([read(do="kill", nodes=[1], probability=0.0)], 1, NODES, ROUNDS)
    assert len(resolve([read(do="kill", nodes=[1], probability=1.0)], 1, NODES, ROUNDS)) == ROUNDS


@pytest.mark.parametrize(("given", "wrong"), [
    ({"do": "kill", "nodes": [1], "every_seconds": 5}, "until_seconds"),
    ({"do": "kill", "nodes": [1], "at_round": 5, "until_seconds": 5}, "every_seconds"),
    ({"do": "kill", "nodes": [1], "count": 1, "probability": 0.5}, "either count or probability"),
    ({"do": "kill", "nodes": "some", "at_round": 1}, "all"),
    ({"do": "drop", "at_round": 1, "probability": 0.5}, "either at_seconds or at_round"),
    ({"do": "drop", "share": 1.5}, "share"),
])  # fmt: skip
def test_what_says_no_time_or_two_is_refused(given: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        read(**given)


@pytest.mark.slow
def test_nodes_that_there_are_not_and_plans_without_end() -> None:
    with pytest.raises(UsageError, match=r"faults\[1\] must name uids below 8, got 8"):
        resolve([read(do="drop"), read(do="cut", sides=[[1], [8]], at_round=1, seconds=1)], 1, NODES, ROUNDS)
    with pytest.raises(UsageError, match="at most 100,000 faults"):
        resolve([read(do="kill", nodes="all", probability=1)], 1, NODES, 20_000)


def course(uid: int, *faults: AnyFault) -> tuple[Course, list[int]]:
    began: list[int] = []
    return Course(faults, uid, (Fault,), lambda found: began.append(found.index)), began


def test_in_effect_from_its_time_to_its_end() -> None:
    mine, others = Slow(nodes=(1,), at_seconds=2, factor=3, seconds=4), Slow(nodes=(2,), at_seconds=2, factor=3)
    found, began = course(1, mine, others)
    assert not found.in_effect(1e9)  # before the run began
    found.begin(100.0, 100.0)
    assert [len(found.in_effect(now)) for now in (101.9, 102.0, 105.9, 106.0)] == [0, 1, 1, 0]
    assert began == [0]


def test_in_effect_from_its_round_on() -> None:
    found, began = course(1, Slow(nodes=(1,), at_round=3, factor=3), Kill(nodes=(1,), at_round=4))
    found.begin(0.0, 0.0)
    seen = []
    for round in (0, 2, 5):  # round 3 was missed
        found.enter(round, float(round))
        seen.append([(each.index, each.until) for each in found.in_effect(float(round))])
    assert seen == [[], [], [(0, math.inf)]] and began == [0, 1]


def test_a_process_that_was_started_again_repeats_only_what_lasts() -> None:
    plan = (
        Kill(nodes=(1,), at_round=4), Kill(nodes=(1,), at_round=9), Slow(nodes=(1,), at_round=2, factor=3),
        Slow(nodes=(1,), at_round=2, factor=3, seconds=9), Slow(nodes=(1,), at_seconds=5, factor=2, seconds=10),
        Break(source=1, to=2, at_seconds=5), Slow(nodes=(1,), at_seconds=5, factor=2, seconds=1),
        Break(source=1, to=2, at_seconds=20),
    )  # fmt: skip
    found, began = course(1, *plan)
    found.begin(0.0, 12.0, is_restart=True)
    found.enter(5, 12.0)
    assert began == [4, 2] and [each.index for each in found.in_effect(13.0)] == [4, 2]
    found.enter(9, 14.0)
    assert [each.index for each in found.in_effect(21.0)] == [2] and began == [4, 2, 1, 7]


def test_the_fate_of_a_message_depends_on_its_connection_and_number_alone() -> None:
    faults = [(0, Drop(share=0.3)), (1, Corrupt(share=0.2, source=(0,), to=(2,), plane="bulk"))]

    def fates(seed: int, to: int, plane: int, count: int = 400) -> list[tuple[bool, float | None]]:
        of = MessageFates(seed)
        found = [of.of(faults, 0, to, plane) for _ in range(count)]
        return [(each.lost, each.flipped) for each in found]

    assert fates(1, 1, 0) == fates(1, 1, 0) != fates(2, 1, 0) != fates(2, 2, 0)
    assert 80 < sum(lost for lost, _ in fates(1, 1, 0)) < 160
    assert not any(flipped for _, flipped in fates(1, 2, 0) + fates(1, 1, 1))
    flips = [flipped for _, flipped in fates(1, 2, 1) if flipped is not None]
    assert 50 < len(flips) < 110 and all(0 <= each < 1 for each in flips)


@pytest.mark.parametrize("where", [0.0, 0.2, 0.5, 0.99999])
def test_one_bit_of_a_message_is_flipped(where: float) -> None:
    frames = [b"\0" * 3, b"\0" * 7]
    found = damaged(frames, where)
    assert sum(bin(int.from_bytes(each, "big")).count("1") for each in found) == 1
    assert [len(each) for each in found] == [3, 7] and bool(any(found[0])) == (where < 0.3)
