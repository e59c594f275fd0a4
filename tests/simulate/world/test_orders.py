"""Orders of users (pause, resume, evaluate, stop) to runs of whole nodes on virtual time, also while nodes die."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.faults import Faults, Link
from decentnode.simulate.world.world import World
from decentnode.wire.generation import Limits
from decentnode.wire.orders import Action
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import NodeRun

NODES, ROUNDS = 6, 12
LONG_SECONDS = 5000.0
"""Longer than every time-out."""


def run_with_orders(
    orders: list[tuple[int, Action]], resume_after: float = 0.0, limits: bool = False, kill: float = 0.0, **node: Any
) -> tuple[NodeRun, World]:
    """Runs nodes to the end. orders: (round, order) that node 3 gives when it begins that round. resume_after: seconds
    after a pause in which node 5 orders to resume; 0 for no such order. limits: whether nodes regroup. kill: seconds
    after a pause or a `meet` in which node 2 dies; 0 for never. node: keys of the section `node`."""
    options = {"missing": "regroup"} if limits else {}
    run = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=ROUNDS, evaluate_every=4, **{**options, **node})
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

    world = run.world(compute_seconds=seconds, faults=Faults(links=Link(latency_seconds=0.002)),
                       **({"limits": Limits(3.0, 20.0, 2, ROUNDS)} if limits else {}))  # fmt: skip
    found.append(world)
    assert world.run(1e5) and not any(process.error for process in world.lives)
    return run, world


def rounds_of_control_records(run: NodeRun, what: str) -> dict[int, list[int]]:
    """Returns, by uid, the rounds before which a node carried an order out. what: paused, resumed or evaluated."""
    records = [record for record in run.records if record["kind"] == "control" and record["what"] == what]
    return {uid: [record["round"] for record in records if record["uid"] == uid] for uid in run.nodes}


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("limits", [False, True])
def test_in_a_pause_longer_than_all_time_outs_no_node_is_suspected(schedule: str, limits: bool) -> None:
    run, world = run_with_orders([(3, "pause")], LONG_SECONDS, limits, schedule=schedule)
    paused = rounds_of_control_records(run, "paused")
    assert len({tuple(each) for each in paused.values()}) == 1 and len(paused[0]) == 1
    assert rounds_of_control_records(run, "resumed") == paused
    assert world.heap.now > LONG_SECONDS
    assert all(node.round == ROUNDS for node in run.nodes.values())
    assert not any(record.get("missing") or record["kind"] == "generation" for record in run.records)
    rounds = [record["round"] for record in run.records if record["kind"] == "round"]
    assert sorted(rounds) == sorted([*range(ROUNDS)] * NODES)


def test_a_pause_does_not_change_the_models() -> None:
    plain, _ = run_with_orders([])
    paused, _ = run_with_orders([(3, "pause")], LONG_SECONDS)
    for uid, node in plain.nodes.items():
        assert node.training.model.parameters.equal(paused.nodes[uid].training.model.parameters)


@pytest.mark.parametrize("kill", [0.0, 1.0])
def test_nodes_that_met_for_a_stop_which_is_never_ordered_stop_by_themselves(kill: float) -> None:
    """As when the machine that was to order the stop is killed before it does."""
    run, world = run_with_orders([(3, "meet")], limits=True, kill=kill)
    alive = [node for uid, node in run.nodes.items() if not kill or uid != 2]
    assert {node.round for node in alive} == {rounds_of_control_records(run, "paused")[0][0]}
    assert alive[0].round < ROUNDS and all(node.communication.stopping for node in alive)
    assert not any(rounds_of_control_records(run, "resumed").values())
    assert 5.0 < world.heap.now < LONG_SECONDS


def test_an_ordered_evaluation_is_made_by_all_nodes_before_the_same_round_and_changes_no_model() -> None:
    plain, _ = run_with_orders([])
    run, _ = run_with_orders([(5, "evaluate")])
    at = rounds_of_control_records(run, "evaluated")
    assert len({tuple(each) for each in at.values()}) == 1 and len(at[0]) == 1 and at[0][0] not in (0, 4, 8, 12)
    evaluations = [record for record in run.records
                   if record["kind"] == "evaluation" and record["round"] == at[0][0]]  # fmt: skip
    assert len(evaluations) == NODES and all(record["contributors"] == NODES for record in evaluations)
    for uid, node in plain.nodes.items():
        assert node.training.model.parameters.equal(run.nodes[uid].training.model.parameters)


def test_a_paused_run_can_be_evaluated() -> None:
    run, _ = run_with_orders([(3, "pause"), (3, "evaluate")], LONG_SECONDS)
    assert rounds_of_control_records(run, "evaluated") == rounds_of_control_records(run, "paused")


def test_the_death_of_a_node_in_a_pause_is_noticed_when_the_run_is_resumed() -> None:
    """Then the others go on without it."""
    run, _ = run_with_orders([(3, "pause")], LONG_SECONDS, limits=True, kill=50.0)
    others = [uid for uid in run.nodes if uid != 2]
    assert all(run.nodes[uid].round == ROUNDS for uid in others)
    assert {tuple(record["members"]) for record in run.records if record["kind"] == "generation"} == {tuple(others)}
