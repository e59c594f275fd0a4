"""Runs of whole nodes stand still, go on and evaluate when people order it, on every schedule and over every fault."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.faults import Faults, Link
from decentnode.simulate.world.world import World
from decentnode.wire.generation import Limits
from decentnode.wire.orders import Action
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import Made

NODES, ROUNDS = 6, 12
LONG_SECONDS = 5000.0
"""More than any time-out."""


def run(
    orders: list[tuple[int, Action]], resume_after: float = 0.0, limits: bool = False, kill: float = 0.0, **node: Any
) -> tuple[Made, World]:
    """Orders that node 3 gives as it begins its rounds, and `resume` so many seconds after it was paused."""
    options = {"missing": "regroup"} if limits else {}
    made = Made(make("ring", nodes=NODES), RULES["full"], rounds=ROUNDS, evaluate_every=4, **{**options, **node})
    found: list[World] = []
    given: set[tuple[int, Action]] = set()

    def give(uid: int, action: Action) -> None:
        process = found[0].processes[uid]
        process.node.communication.order(action)
        process.transport.io.settle()

    def seconds(uid: int, round: int) -> float:
        for at, action in orders:
            if uid == 3 and round == at and (at, action) not in given:
                given.add((at, action))
                found[0].heap.after(0.001, lambda action=action: give(3, action))  # type: ignore[misc]
                if action == "pause" and resume_after:
                    found[0].heap.after(resume_after, lambda: give(5, "resume"))
                if action in ("pause", "meet") and kill:
                    found[0].heap.after(kill, found[0].processes[2].kill)
        return 0.05 + 0.01 * uid

    world = made.world(compute_seconds=seconds, faults=Faults(links=Link(latency_seconds=0.002)),
                       **({"limits": Limits(3.0, 20.0, 2, ROUNDS)} if limits else {}))  # fmt: skip
    found.append(world)
    assert world.run(1e5) and not any(process.error for process in world.lives)
    return made, world


def told(made: Made, what: str) -> dict[int, list[int]]:
    """uid -> before which rounds."""
    records = [each for each in made.records if each["kind"] == "control" and each["what"] == what]
    return {uid: [each["round"] for each in records if each["uid"] == uid] for uid in made.nodes}


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("limits", [False, True])
def test_a_long_pause_is_no_silence(schedule: str, limits: bool) -> None:
    made, world = run([(3, "pause")], LONG_SECONDS, limits, schedule=schedule)
    paused = told(made, "paused")
    assert len({tuple(each) for each in paused.values()}) == 1 and len(paused[0]) == 1
    assert told(made, "resumed") == paused
    assert world.heap.now > LONG_SECONDS
    assert all(node.round == ROUNDS for node in made.nodes.values())
    assert not any(each.get("missing") or each["kind"] == "generation" for each in made.records), "nobody was suspected"
    rounds = [each["round"] for each in made.records if each["kind"] == "round"]
    assert sorted(rounds) == sorted([*range(ROUNDS)] * NODES)


def test_a_pause_changes_no_model() -> None:
    plain, _ = run([])
    paused, _ = run([(3, "pause")], LONG_SECONDS)
    for uid, node in plain.nodes.items():
        assert node.training.model.parameters.equal(paused.nodes[uid].training.model.parameters)


@pytest.mark.parametrize("kill", [0.0, 1.0])
def test_who_stands_still_for_a_stop_that_nobody_tells_stops(kill: float) -> None:
    """As where the machine that was to stop is killed before it has told the others."""
    made, world = run([(3, "meet")], limits=True, kill=kill)
    rest = [node for uid, node in made.nodes.items() if not kill or uid != 2]
    assert {node.round for node in rest} == {told(made, "paused")[0][0]} and rest[0].round < ROUNDS
    assert all(node.communication.stopping for node in rest) and not any(told(made, "resumed").values())
    assert 5.0 < world.heap.now < LONG_SECONDS


def test_an_evaluation_is_made_by_all_before_the_same_round_and_changes_no_model() -> None:
    plain, _ = run([])
    made, _ = run([(5, "evaluate")])
    at = told(made, "evaluated")
    assert len({tuple(each) for each in at.values()}) == 1 and len(at[0]) == 1 and at[0][0] not in (0, 4, 8, 12)
    merged = [each for each in made.records if each["kind"] == "evaluation" and each["round"] == at[0][0]]
    assert len(merged) == NODES and all(each["contributors"] == NODES for each in merged)
    for uid, node in plain.nodes.items():
        assert node.training.model.parameters.equal(made.nodes[uid].training.model.parameters)


def test_while_the_run_stands_still_it_can_be_evaluated() -> None:
    made, _ = run([(3, "pause"), (3, "evaluate")], LONG_SECONDS)
    assert told(made, "evaluated") == told(made, "paused")


def test_a_node_that_dies_in_a_pause_is_missed_by_nobody_until_the_run_goes_on() -> None:
    """Then the others go on without it."""
    made, _ = run([(3, "pause")], LONG_SECONDS, limits=True, kill=50.0)
    others = [uid for uid in made.nodes if uid != 2]
    assert all(made.nodes[uid].round == ROUNDS for uid in others)
    assert {tuple(each["members"]) for each in made.records if each["kind"] == "generation"} == {tuple(others)}
