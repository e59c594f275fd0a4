"""Whole nodes that are in no mapping come to a run, on virtual time."""

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
from tests.simulate.world.runs import CONFIG, Made

LIMIT = 1e4


def begun(
    nodes: int = 4, newcomers: int = 2, rounds: int = 30, family: str = "ring", **setting: Any
) -> tuple[Made, World]:
    graph = Growing(make(family, nodes=nodes), lambda count: make(family, nodes=count))
    made = Made(graph, RULES["full"], rounds=rounds, evaluate_every=10, missing="regroup")
    limits = Limits(3.0, 20.0, nodes // 2 + 1, rounds)
    return made, made.world(newcomers=newcomers, limits=limits, compute_seconds=lambda _uid, _round: 0.1, **setting)


def members(made: Made) -> list[list[int]]:
    return [record["members"] for record in made.records if record["kind"] == "generation" and record["uid"] == 0]


def asks(world: World, seconds: float, ask: int, at: str) -> None:
    world.heap.at(seconds, lambda: world.admit(ask, at))


def test_a_newcomer_gets_a_uid_neighbors_and_the_mean_of_the_models() -> None:
    made, world = begun()
    asks(world, 1.0, 2, "10.0.0.9")
    before: dict[int, torch.Tensor] = {}
    given: list[torch.Tensor] = []

    def look(process: Any) -> None:
        if process.uid == 4 and process.node.round and not given:
            given.append(process.node.training.model.parameters.clone())
            before.update({uid: made.nodes[uid].training.model.parameters.clone() for uid in range(4)})

    world.settled = look
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members(made) == [[0, 1, 2, 3, 4]]
    assert made.nodes[4].round == 30 and made.nodes[4].graph.neighbors(4, 0, (0, 1, 2, 3, 4)) == (0, 3)
    assert made.nodes[0].reports.keys() == {0, 1, 2, 3, 4}
    assert given and torch.allclose(given[0], torch.stack([*before.values()]).mean(0), atol=0.5)
    merged = torch.stack([made.nodes[uid].training.model.parameters for uid in range(5)]).mean(0)
    for uid in range(5):
        assert torch.allclose(made.nodes[uid].merged, merged, atol=1e-5)  # type: ignore[arg-type]


def test_two_at_once_and_one_too_many() -> None:
    made, world = begun(newcomers=2, rounds=60)
    for index, ask in enumerate((0, 3, 1)):
        asks(world, 1.0 + index, ask, f"10.0.0.{index}")
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members(made)[-1] == [0, 1, 2, 3, 4, 5] and world.happened["admitted"] == 2
    assert world.turned_away == ["the run is over"]  # it was told to ask again until then


@pytest.mark.slow
def test_a_newcomer_that_dies_and_asks_again_from_its_place_gets_its_uid() -> None:
    made, world = begun(rounds=120, faults=Faults(links=Link(), plan=()))
    asks(world, 1.0, 0, "10.0.0.9")
    world.heap.at(4.0, lambda: world.processes[4].kill())
    asks(world, 5.0, 1, "10.0.0.9")
    assert world.run(LIMIT)
    assert [process.uid for process in world.lives] == [0, 1, 2, 3, 4, 4]
    assert members(made)[-1] == [0, 1, 2, 3, 4] and made.nodes[4].round == 120


@pytest.mark.slow
def test_newcomers_do_not_make_up_for_members_of_the_mapping() -> None:
    """Of two sides of a broken network with newcomers at one, the side with most of the mapping's nodes goes on."""
    made, world = begun(newcomers=2, rounds=300)
    world.heap.at(5.0, lambda: world.network.partition([0, 1, 2], [3, 4, 5], 20.0))
    asks(world, 1.0, 0, "10.0.0.1")
    asks(world, 2.0, 0, "10.0.0.2")
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    told = [record["members"] for record in made.records if record["kind"] == "generation"]
    assert [0, 1, 2] in told and [3, 4, 5] not in told
    assert members(made)[-1] == [0, 1, 2, 3, 4, 5] and made.nodes[5].round == 300


@pytest.mark.slow
@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_newcomers_come_over_links_that_lose_and_repeat(seed: int) -> None:
    faults = Faults(links=Link(loss=0.05, duplication=0.05, reordering=0.05), lossy_seconds=20.0)
    made, world = begun(newcomers=2, rounds=80, family="exponential", seed=seed, faults=faults)
    asks(world, 1.0, 0, "10.0.0.1")
    asks(world, 1.0, 3, "10.0.0.2")
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members(made)[-1] == [0, 1, 2, 3, 4, 5] and made.nodes[5].round == 80


@pytest.mark.slow
def test_who_was_granted_a_uid_by_a_leader_that_died_ends_and_may_ask_again() -> None:
    """Nobody else knows of the first newcomer. The second, which the next leader admits, has the same uid."""
    config = CONFIG.model_copy(update={"start_timeout_seconds": 5.0})
    faults = Faults(plan=(Kill(at_seconds=1.0, nodes=[0]),))
    made, world = begun(nodes=5, rounds=200, config=config, faults=faults)
    asks(world, 0.9999, 0, "10.0.0.1")
    asks(world, 12.0, 1, "10.0.0.2")
    assert world.run(LIMIT)
    first, second = [process for process in world.lives if process.uid == 5]
    assert isinstance(first.error, PeerLost) and second.error is None and second.node.round == 200
    assert all(made.nodes[uid].round == 200 for uid in range(1, 5))


@pytest.mark.slow
@pytest.mark.sampled(one=["uid"])
@pytest.mark.parametrize("uid", [1, 4])
def test_a_node_leaves_in_peace_and_nobody_has_to_find_out(uid: int) -> None:
    """One of the mapping, and one that came."""
    made, world = begun(rounds=80)
    told: list[tuple[str, float, str]] = []

    def began(process: Process) -> None:
        process.transport.counters.on_event = lambda kind, _peer, detail: told.append((kind, world.heap.now, detail))

    world.began = began
    asks(world, 1.0, 0, "10.0.0.9")
    world.heap.at(5.0, lambda: made.nodes[uid].ask_leave())
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    others = sorted({0, 1, 2, 3, 4} - {uid})
    assert members(made)[-1] == others and all(made.nodes[each].round == 80 for each in others)
    assert made.nodes[uid].left and 0 < made.nodes[uid].round < 80
    over = [(at, detail) for kind, at, detail in told if kind == "generation_over" and "left before" in detail]
    assert over and max(at for at, _ in over) < 6.0  # of virtual time: a round, not the 3 s of a suspicion
    assert "suspected" not in {kind for kind, _, _ in told}
