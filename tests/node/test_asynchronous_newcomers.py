"""Nodes that are in no mapping come to runs whose nodes are in different rounds, and leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.faults import Faults, Link
from decentnode.graph.growing import Growing
from decentnode.node.schedules.asynchronous.push_sum import AsynchronousPushSum
from decentnode.simulate.world.world import Process, World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.node.test_asynchronous import LIMIT, mass, pairs, spread
from tests.node.test_asynchronous_checkpoints import Kept, kept, resumed
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

NODES = 5
WAYS: dict[str, dict[str, Any]] = {
    "push_sum": {"rule": "push_sum"}, "gossip": {"rule": "full", "buffers": 2},
    "pairs": {"rule": "full", "schedule": "ad_psgd"}, "epidemic": {"rule": "full", "schedule": "epidemic"},
}  # fmt: skip
LATE = Link(latency_seconds=0.25, jitter_seconds=0.05, queue_messages=20)
LOSSY = Link(latency_seconds=0.25, jitter_seconds=0.2, queue_messages=20, loss=0.1, duplication=0.1, reordering=0.1)


def begun(way: str, *, rounds: int = 120, links: Link = LATE, lossy_seconds: float = 0.0, lr: float = 0.0,
          **setting: Any) -> tuple[NodeRun, World]:  # fmt: skip
    """Nodes of which one is slow, over connections on which something is always under way."""
    graph = Growing(make("ring", nodes=NODES), lambda count: make("ring", nodes=count))
    options = {"schedule": "gossip_async", "lr": lr, "evaluate_every": 0, **WAYS[way]}
    made = NodeRun(graph, RULES[options.pop("rule")], rounds=rounds, missing="regroup", **options)
    given = {"limits": Limits(3.0, 20.0, 3, rounds), "faults": Faults(links=links, lossy_seconds=lossy_seconds),
             "seed": 1, **setting}  # fmt: skip
    slow = {2: 6.0, 5: 2.0}
    return made, made.world(newcomers=2, compute_seconds=lambda uid, _: 0.1 * slow.get(uid, 1.0), **given)


def asks(world: World, seconds: float, ask: int = 2, at: str = "10.0.0.9") -> None:
    world.heap.at(seconds, lambda: world.admit(ask, at))


def ran(world: World) -> None:
    assert world.run(LIMIT), {p.uid: (p.node.doing, type(p.wait).__name__) for p in world.processes.values()}
    assert not any(process.error for process in world.lives), [process.error for process in world.lives]


def starts(made: NodeRun, world: World) -> dict[int, Tensor]:
    """Filled while the world runs: the model with which each newcomer begins."""
    given: dict[int, Tensor] = {}

    def look(process: Process) -> None:
        if process.uid >= NODES and process.node.round and process.uid not in given:
            given[process.uid] = process.node.training.model.parameters.double()

    world.settled = look
    return given


def founded(made: NodeRun) -> Tensor:
    """The sum of the models that the nodes of the mapping began with."""
    return torch.stack([made.nodes[uid].training.initial for uid in range(NODES)]).double().sum(0)  # type: ignore[attr-defined]


def schedule_of(made: NodeRun, uid: int) -> AsynchronousPushSum:
    schedule = made.nodes[uid].schedule
    assert isinstance(schedule, AsynchronousPushSum)
    return schedule


@pytest.mark.sampled(one=["way"])
@pytest.mark.parametrize("way", WAYS)
def test_a_newcomer_is_admitted_while_each_node_is_in_a_round_of_its_own(way: str) -> None:
    made, world = begun(way, rounds=60)
    given = starts(made, world)
    asks(world, 1.0)
    ran(world)
    rounds = {uid: node.round for uid, node in made.nodes.items()}
    assert max(rounds.values()) == 60 and 25 < rounds[5] < 45 and rounds[2] < 15, "nobody waits for who is slow"
    for uid in range(NODES):
        assert made.nodes[uid].training.made == list(range(rounds[uid])), "none skipped, none twice"  # type: ignore[attr-defined]
    assert made.nodes[5].reports.keys() == set() and made.nodes[0].reports.keys() == set(range(6))
    assert spread(made.nodes) < (0.4 if way == "pairs" else 0.1) and 5 in given  # chance decides which pairs average


@pytest.mark.slow
@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_push_sum_keeps_the_mass_when_a_node_comes_and_brings_a_weight_of_one(seed: int) -> None:
    """Also what was under way on edges that the greater graph does not have, over connections that lose and repeat."""
    made, world = begun("push_sum", links=LOSSY, lossy_seconds=14.0, seed=seed, rounds=180)
    given = starts(made, world)
    asks(world, 1.0)
    asks(world, 11.0, 0, "10.0.0.8")
    ran(world)
    total, weight = mass(made)
    assert weight == pytest.approx(7, abs=1e-9)
    assert torch.allclose(total, founded(made) + given[5] + given[6], atol=1e-4)
    for uid, other in (0, 4), (4, 0), (0, 5), (5, 0):
        sender, receiver = schedule_of(made, uid), schedule_of(made, other)
        assert other not in sender.view.neighbors and sender._sent[other].w == receiver._seen[uid].w > 0


@pytest.mark.slow
@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_keep_their_sum_when_a_node_comes_between_them(seed: int) -> None:
    """Two nodes that are neighbors no more bring what is under way between them to its end, also at the run's."""
    made, world = begun("pairs", links=LOSSY, lossy_seconds=20.0, seed=seed, rounds=30)
    given = starts(made, world)
    asks(world, 1.6)
    ran(world)
    end = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double().sum(0)
    assert torch.allclose(end, founded(made) + given[5], atol=1e-4)
    found = pairs(made)
    for uid, schedule in found.items():
        assert all(schedule.given[other] == found[other].taken[uid] for other in found)
        assert not any(pair.is_unsettled for pair in schedule._pairs.values())
    assert 4 not in found[0].view.neighbors, "the greater ring has other edges"


@pytest.mark.sampled(one=["way", "uid"])
@pytest.mark.parametrize("uid", [1, 5])
@pytest.mark.parametrize("way", ["push_sum", "gossip", "pairs"])
def test_a_node_leaves_in_peace_and_the_others_go_on(way: str, uid: int) -> None:
    """One of the mapping, and one that came."""
    made, world = begun(way, lr=0.1, rounds=90)
    asks(world, 1.0)
    world.heap.at(5.0, lambda: made.nodes[uid].ask_leave())
    ran(world)
    others = sorted({*range(6)} - {uid})
    told = [each["members"] for each in made.records if each["kind"] == "generation" and each["uid"] == 0]
    assert told == [[*range(6)], others] and made.nodes[uid].left and 0 < made.nodes[uid].round < 90
    assert max(node.round for node in made.nodes.values()) == 90 and made.nodes[0].reports.keys() == {*others}
    if way == "push_sum":
        assert mass(made, frozenset({uid}))[1] == pytest.approx(5, abs=1e-9)


class Open(Kept):
    """Nodes that write checkpoints, and admit others."""

    def __init__(self, folder: Path, resume: Path | None = None, **way: Any) -> None:
        graph = Growing(make("ring", nodes=NODES), lambda count: make("ring", nodes=count))
        super().__init__(folder, resume, graph=graph, missing="regroup", **way)

    def until(self, seconds: float, **setting: Any) -> World:
        return super().until(seconds, limits=Limits(3.0, 20.0, 3, 120), newcomers=2, **setting)

    def world(self, witness: Any = None, **setting: Any) -> World:
        made = super().world(witness, **setting)
        if self.from_where is None:
            asks(made, 1.0)
        return made


@pytest.mark.slow
@pytest.mark.sampled(one=["way"])
@pytest.mark.parametrize("way", ["push_sum", "gossip", "pairs", "sequential"])
def test_a_run_that_admitted_a_node_is_resumed_without_it(tmp_path: Path, way: str) -> None:
    """As after a death; it may ask again. Without what rules keep of edges that there are not: as in a new generation
    of members."""
    keys = {**WAYS, "sequential": {"rule": "full", "schedule": "sequential"}}[way]
    first = Open(tmp_path / "a", **keys)
    first.until(9.0, faults=Faults())
    assert first.nodes[5].round > 8 and any(uids == {*range(6)} for uids in kept(first.folder).values())
    second = Open(tmp_path / "b", first.folder, **keys)
    world = second.until(LIMIT, faults=Faults())
    assert not any(process.error for process in world.lives), [process.error for process in world.lives]
    assert resumed(second).keys() == {*range(NODES)} and all(not each["without"] for each in resumed(second).values())
    assert max(node.round for node in second.nodes.values()) == 120
    if way == "push_sum":
        assert all(5 not in schedule_of(second, uid)._sent for uid in range(NODES))
        assert mass(second)[1] == pytest.approx(NODES, abs=1e-9)
    if way == "pairs":
        assert all(5 not in each._pairs for each in pairs(second).values())


@pytest.mark.slow
@pytest.mark.parametrize("way", [
    "push_sum", pytest.param("gossip", marks=pytest.mark.slow), pytest.param("pairs", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_newcomer_that_died_is_noticed_though_nobody_waits_for_it(way: str) -> None:
    """Else push_sum gives it a share of the mass in each round, until nobody has anything to give."""
    config = CONFIG.model_copy(update={"suspect_seconds": 2.0})
    made, world = begun(way, rounds=200, links=Link(), config=config)
    asks(world, 1.0)
    at: dict[int, float] = {}
    world.heap.at(5.0, lambda: world.processes[5].kill())
    world.settled = lambda process: at.setdefault(process.node.generation.number, world.heap.now) and None
    ran(world)
    told = [each["members"] for each in made.records if each["kind"] == "generation" and each["uid"] == 0]
    assert told == [[*range(6)], [*range(5)]]
    assert at[2] < 5 + 2 + 3 + 2, "silent for so long, then without an answer for as long as is borne, and two rounds"
    assert all(made.nodes[uid].round > 30 for uid in range(NODES)) and spread(
        {uid: made.nodes[uid] for uid in range(NODES)}) < 0.01  # fmt: skip
    if way == "push_sum":
        assert mass(made, frozenset({5}))[1] == pytest.approx(NODES, abs=1e-9)


def test_a_slow_node_is_asked_and_stays() -> None:
    """Its rounds last longer than silence is borne."""
    config = CONFIG.model_copy(update={"suspect_seconds": 0.4})
    made, world = begun("gossip", rounds=60, config=config)
    asked: list[int] = []

    def look(process: Process) -> None:
        if process.uid == 1 and process.facts.long_silent is not None:
            asked.extend(process.facts.long_silent[0])

    world.settled = look
    ran(world)
    assert 2 in asked and not [each for each in made.records if each["kind"] == "generation"]
