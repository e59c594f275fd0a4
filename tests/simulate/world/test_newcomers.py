"""Newcomers: whole nodes that are not in the mapping join a run, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentnode.errors import PeerLost
from decentnode.faults import Faults, Kill, Link
from decentnode.graph.growing import Growing
from decentnode.simulate.world.world import Process, World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

LIMIT = 1e4


def growing_run(
    nodes: int = 4, newcomers: int = 2, rounds: int = 30, family: str = "ring", **setting: Any
) -> tuple[NodeRun, World]:
    """Returns the nodes of a run that newcomers may join, and their world, which has not run yet."""
    graph = Growing(make(family, nodes=nodes), lambda count: make(family, nodes=count))
    run = NodeRun(graph, RULES["full"], rounds=rounds, evaluate_every=10, missing="regroup")
    limits = Limits(3.0, 20.0, nodes // 2 + 1, rounds)
    return run, run.world(newcomers=newcomers, limits=limits, compute_seconds=lambda _uid, _round: 0.1, **setting)


def members_of_node_0(run: NodeRun) -> list[list[int]]:
    return [record["members"] for record in run.records if record["kind"] == "generation" and record["uid"] == 0]


def ask_to_join(world: World, seconds: float, ask: int, at: str) -> None:
    """Lets a newcomer with address `at` ask node `ask` at a virtual time."""
    world.heap.at(seconds, lambda: world.admit(ask, at))


def test_a_newcomer_gets_a_uid_neighbors_and_the_mean_of_the_models() -> None:
    run, world = growing_run()
    ask_to_join(world, 1.0, 2, "10.0.0.9")
    models_of_others: dict[int, torch.Tensor] = {}
    first_model: list[torch.Tensor] = []

    def record_models(process: Any) -> None:
        if process.uid == 4 and process.node.round and not first_model:
            first_model.append(process.node.training.model.parameters.clone())
            models_of_others.update({uid: run.nodes[uid].training.model.parameters.clone() for uid in range(4)})

    world.settled = record_models
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members_of_node_0(run) == [[0, 1, 2, 3, 4]]
    assert run.nodes[4].round == 30 and run.nodes[4].graph.neighbors(4, 0, (0, 1, 2, 3, 4)) == (0, 3)
    assert run.nodes[0].reports.keys() == {0, 1, 2, 3, 4}
    mean = torch.stack([*models_of_others.values()]).mean(0)
    assert first_model and torch.allclose(first_model[0], mean, atol=0.5)
    merged = torch.stack([run.nodes[uid].training.model.parameters for uid in range(5)]).mean(0)
    for uid in range(5):
        assert torch.allclose(run.nodes[uid].merged, merged, atol=1e-5)  # type: ignore[arg-type]


def test_two_newcomers_join_and_a_third_for_which_there_is_no_place_is_turned_away() -> None:
    run, world = growing_run(newcomers=2, rounds=60)
    for index, ask in enumerate((0, 3, 1)):
        ask_to_join(world, 1.0 + index, ask, f"10.0.0.{index}")
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members_of_node_0(run)[-1] == [0, 1, 2, 3, 4, 5] and world.happened["admitted"] == 2
    assert world.turned_away == ["the run is over"]  # until then the third was told to ask again


@pytest.mark.slow
def test_a_newcomer_that_dies_and_asks_again_from_the_same_address_gets_the_same_uid() -> None:
    run, world = growing_run(rounds=120, faults=Faults(links=Link(), plan=()))
    ask_to_join(world, 1.0, 0, "10.0.0.9")
    world.heap.at(4.0, lambda: world.processes[4].kill())
    ask_to_join(world, 5.0, 1, "10.0.0.9")
    assert world.run(LIMIT)
    assert [process.uid for process in world.lives] == [0, 1, 2, 3, 4, 4]
    assert members_of_node_0(run)[-1] == [0, 1, 2, 3, 4] and run.nodes[4].round == 120


@pytest.mark.slow
def test_newcomers_do_not_count_when_the_majority_of_a_broken_network_is_determined() -> None:
    """The side with most nodes of the mapping goes on, also if the other side has more nodes with its newcomers."""
    run, world = growing_run(newcomers=2, rounds=300)
    world.heap.at(5.0, lambda: world.network.partition([0, 1, 2], [3, 4, 5], 20.0))
    ask_to_join(world, 1.0, 0, "10.0.0.1")
    ask_to_join(world, 2.0, 0, "10.0.0.2")
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    generations = [record["members"] for record in run.records if record["kind"] == "generation"]
    assert [0, 1, 2] in generations and [3, 4, 5] not in generations
    assert members_of_node_0(run)[-1] == [0, 1, 2, 3, 4, 5] and run.nodes[5].round == 300


@pytest.mark.slow
@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_newcomers_join_over_links_that_lose_duplicate_and_reorder_messages(seed: int) -> None:
    faults = Faults(links=Link(loss=0.05, duplication=0.05, reordering=0.05), lossy_seconds=20.0)
    run, world = growing_run(newcomers=2, rounds=80, family="exponential", seed=seed, faults=faults)
    ask_to_join(world, 1.0, 0, "10.0.0.1")
    ask_to_join(world, 1.0, 3, "10.0.0.2")
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members_of_node_0(run)[-1] == [0, 1, 2, 3, 4, 5] and run.nodes[5].round == 80


@pytest.mark.slow
def test_a_newcomer_whose_leader_died_after_granting_a_uid_fails_and_the_next_one_gets_that_uid() -> None:
    """No other node knows of the first newcomer."""
    config = CONFIG.model_copy(update={"start_timeout_seconds": 5.0})
    faults = Faults(plan=(Kill(at_seconds=1.0, nodes=[0]),))
    run, world = growing_run(nodes=5, rounds=200, config=config, faults=faults)
    ask_to_join(world, 0.9999, 0, "10.0.0.1")
    ask_to_join(world, 12.0, 1, "10.0.0.2")
    assert world.run(LIMIT)
    first, second = [process for process in world.lives if process.uid == 5]
    assert isinstance(first.error, PeerLost) and second.error is None and second.node.round == 200
    assert all(run.nodes[uid].round == 200 for uid in range(1, 5))


@pytest.mark.slow
@pytest.mark.sampled(one=["uid"])
@pytest.mark.parametrize("uid", [1, 4])
def test_a_node_that_is_ordered_to_leave_is_not_suspected_by_the_others(uid: int) -> None:
    """Node 1 is in the mapping, node 4 is a newcomer."""
    run, world = growing_run(rounds=80)
    events: list[tuple[str, float, str]] = []

    def began(process: Process) -> None:
        process.transport.counters.on_event = lambda kind, _peer, detail: events.append((kind, world.heap.now, detail))

    world.began = began
    ask_to_join(world, 1.0, 0, "10.0.0.9")
    world.heap.at(5.0, lambda: run.nodes[uid].ask_leave())
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    others = sorted({0, 1, 2, 3, 4} - {uid})
    assert members_of_node_0(run)[-1] == others and all(run.nodes[each].round == 80 for each in others)
    assert run.nodes[uid].left and 0 < run.nodes[uid].round < 80
    ended_at = [at for kind, at, detail in events if kind == "generation_over" and "left before" in detail]
    assert ended_at and max(ended_at) < 6.0  # within a round of virtual time, not the 3 s after which nodes suspect
    assert "suspected" not in {kind for kind, _, _ in events}
