"""Newcomers, nodes that are not in the mapping, join asynchronous runs and leave them."""

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
from tests.node.test_asynchronous import LIMIT, ad_psgd_schedules, rms_deviation, total_mass
from tests.node.test_asynchronous_checkpoints import CheckpointedRun, nodes_by_cut, resumed_records
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

NODES = 5
WAYS: dict[str, dict[str, Any]] = {
    "push_sum": {"rule": "push_sum"}, "gossip": {"rule": "full", "buffers": 2},
    "pairs": {"rule": "full", "schedule": "ad_psgd"}, "epidemic": {"rule": "full", "schedule": "epidemic"},
}  # fmt: skip
LATE = Link(latency_seconds=0.25, jitter_seconds=0.05, queue_messages=20)
LOSSY = Link(latency_seconds=0.25, jitter_seconds=0.2, queue_messages=20, loss=0.1, duplication=0.1, reordering=0.1)


def make_world(way: str, *, rounds: int = 120, links: Link = LATE, lossy_seconds: float = 0.0, lr: float = 0.0,
               **setting: Any) -> tuple[NodeRun, World]:  # fmt: skip
    """Nodes of which one is slow, over connections on which messages are always in flight."""
    graph = Growing(make("ring", nodes=NODES), lambda count: make("ring", nodes=count))
    options = {"schedule": "gossip_async", "lr": lr, "evaluate_every": 0, **WAYS[way]}
    made = NodeRun(graph, RULES[options.pop("rule")], rounds=rounds, missing="regroup", **options)
    given = {"limits": Limits(3.0, 20.0, 3, rounds), "faults": Faults(links=links, lossy_seconds=lossy_seconds),
             "seed": 1, **setting}  # fmt: skip
    slow = {2: 6.0, 5: 2.0}
    return made, made.world(newcomers=2, compute_seconds=lambda uid, _: 0.1 * slow.get(uid, 1.0), **given)


def request_admission(world: World, seconds: float, ask: int = 2, at: str = "10.0.0.9") -> None:
    world.heap.at(seconds, lambda: world.admit(ask, at))


def run_to_end(world: World) -> None:
    assert world.run(LIMIT), {p.uid: (p.node.doing, type(p.wait).__name__) for p in world.processes.values()}
    assert not any(process.error for process in world.lives), [process.error for process in world.lives]


def record_start_models(made: NodeRun, world: World) -> dict[int, Tensor]:
    """Returns the models with which newcomers begin, by uid; it is filled while the world runs."""
    given: dict[int, Tensor] = {}

    def record_model(process: Process) -> None:
        if process.uid >= NODES and process.node.round and process.uid not in given:
            given[process.uid] = process.node.training.model.parameters.double()

    world.settled = record_model
    return given


def founders_sum(made: NodeRun) -> Tensor:
    """Returns the sum of the initial models of the nodes in the mapping."""
    return torch.stack([made.nodes[uid].training.initial for uid in range(NODES)]).double().sum(0)  # type: ignore[attr-defined]


def schedule_of(made: NodeRun, uid: int) -> AsynchronousPushSum:
    schedule = made.nodes[uid].schedule
    assert isinstance(schedule, AsynchronousPushSum)
    return schedule


@pytest.mark.sampled(one=["way"])
@pytest.mark.parametrize("way", WAYS)
def test_a_newcomer_is_admitted_while_nodes_are_in_different_rounds(way: str) -> None:
    made, world = make_world(way, rounds=60)
    given = record_start_models(made, world)
    request_admission(world, 1.0)
    run_to_end(world)
    rounds = {uid: node.round for uid, node in made.nodes.items()}
    assert max(rounds.values()) == 60 and 25 < rounds[5] < 45 and rounds[2] < 15, "a node waited for the slow one"
    for uid in range(NODES):
        assert made.nodes[uid].training.made == list(range(rounds[uid])), "skipped or repeated"  # type: ignore[attr-defined]
    assert made.nodes[5].reports.keys() == set() and made.nodes[0].reports.keys() == set(range(6))
    limit = 0.4 if way == "pairs" else 0.1  # chance decides which pairs average
    assert rms_deviation(made.nodes) < limit and 5 in given


@pytest.mark.slow
@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_push_sum_gains_a_weight_of_one_with_a_newcomer_and_keeps_the_total_mass(seed: int) -> None:
    """Including mass in flight on edges that the larger graph does not have, over connections that lose and repeat."""
    made, world = make_world("push_sum", links=LOSSY, lossy_seconds=14.0, seed=seed, rounds=180)
    given = record_start_models(made, world)
    request_admission(world, 1.0)
    request_admission(world, 11.0, 0, "10.0.0.8")
    run_to_end(world)
    total, weight = total_mass(made)
    assert weight == pytest.approx(7, abs=1e-9)
    assert torch.allclose(total, founders_sum(made) + given[5] + given[6], atol=1e-4)
    for uid, other in (0, 4), (4, 0), (0, 5), (5, 0):
        sender, receiver = schedule_of(made, uid), schedule_of(made, other)
        assert other not in sender.view.neighbors and sender._sent[other].w == receiver._seen[uid].w > 0


@pytest.mark.slow
@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_ad_psgd_pairs_keep_their_sum_when_a_newcomer_separates_them(seed: int) -> None:
    """Two former neighbors complete the averaging in flight between them, also at the end of the run."""
    made, world = make_world("pairs", links=LOSSY, lossy_seconds=20.0, seed=seed, rounds=30)
    given = record_start_models(made, world)
    request_admission(world, 1.6)
    run_to_end(world)
    end = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double().sum(0)
    assert torch.allclose(end, founders_sum(made) + given[5], atol=1e-4)
    found = ad_psgd_schedules(made)
    for uid, schedule in found.items():
        assert all(schedule.given[other] == found[other].taken[uid] for other in found)
        assert not any(pair.is_unsettled for pair in schedule._pairs.values())
    assert 4 not in found[0].view.neighbors, "the larger ring has this edge, too"


@pytest.mark.sampled(one=["way", "uid"])
@pytest.mark.parametrize("uid", [1, 5])
@pytest.mark.parametrize("way", ["push_sum", "gossip", "pairs"])
def test_a_node_leaves_on_request_and_the_others_continue(way: str, uid: int) -> None:
    """A node of the mapping or a newcomer."""
    made, world = make_world(way, lr=0.1, rounds=90)
    request_admission(world, 1.0)
    world.heap.at(5.0, lambda: made.nodes[uid].ask_leave())
    run_to_end(world)
    others = sorted({*range(6)} - {uid})
    members_over_time = [record["members"] for record in made.records
                         if record["kind"] == "generation" and record["uid"] == 0]  # fmt: skip
    assert members_over_time == [[*range(6)], others] and made.nodes[uid].left and 0 < made.nodes[uid].round < 90
    assert max(node.round for node in made.nodes.values()) == 90 and made.nodes[0].reports.keys() == {*others}
    if way == "push_sum":
        assert total_mass(made, frozenset({uid}))[1] == pytest.approx(5, abs=1e-9)


class RunWithNewcomers(CheckpointedRun):
    """Nodes write checkpoints and admit newcomers."""

    def __init__(self, folder: Path, resume: Path | None = None, **way: Any) -> None:
        graph = Growing(make("ring", nodes=NODES), lambda count: make("ring", nodes=count))
        super().__init__(folder, resume, graph=graph, missing="regroup", **way)

    def until(self, seconds: float, **setting: Any) -> World:
        return super().until(seconds, limits=Limits(3.0, 20.0, 3, 120), newcomers=2, **setting)

    def world(self, witness: Any = None, **setting: Any) -> World:
        made = super().world(witness, **setting)
        if self.resume_from is None:
            request_admission(made, 1.0)
        return made


@pytest.mark.slow
@pytest.mark.sampled(one=["way"])
@pytest.mark.parametrize("way", ["push_sum", "gossip", "pairs", "sequential"])
def test_a_run_that_admitted_a_newcomer_is_resumed_without_it(tmp_path: Path, way: str) -> None:
    """As after a death; it may ask again. Without what rules keep of edges that there are not: as in a new generation
    of members."""
    keys = {**WAYS, "sequential": {"rule": "full", "schedule": "sequential"}}[way]
    first = RunWithNewcomers(tmp_path / "a", **keys)
    first.until(9.0, faults=Faults())
    assert first.nodes[5].round > 8 and any(uids == {*range(6)} for uids in nodes_by_cut(first.folder).values())
    second = RunWithNewcomers(tmp_path / "b", first.folder, **keys)
    world = second.until(LIMIT, faults=Faults())
    assert not any(process.error for process in world.lives), [process.error for process in world.lives]
    begun = resumed_records(second)
    assert begun.keys() == {*range(NODES)} and all(not record["without"] for record in begun.values())
    assert max(node.round for node in second.nodes.values()) == 120
    if way == "push_sum":
        assert all(5 not in schedule_of(second, uid)._sent for uid in range(NODES))
        assert total_mass(second)[1] == pytest.approx(NODES, abs=1e-9)
    if way == "pairs":
        assert all(5 not in schedule._pairs for schedule in ad_psgd_schedules(second).values())


@pytest.mark.slow
@pytest.mark.parametrize("way", [
    "push_sum", pytest.param("gossip", marks=pytest.mark.slow), pytest.param("pairs", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_death_of_a_newcomer_is_noticed_although_no_node_waits_for_it(way: str) -> None:
    """Otherwise push_sum would give it a share of the mass in each round, until no mass is left."""
    config = CONFIG.model_copy(update={"suspect_seconds": 2.0})
    made, world = make_world(way, rounds=200, links=Link(), config=config)
    request_admission(world, 1.0)
    at: dict[int, float] = {}
    world.heap.at(5.0, lambda: world.processes[5].kill())
    world.settled = lambda process: at.setdefault(process.node.generation.number, world.heap.now) and None
    run_to_end(world)
    members_over_time = [record["members"] for record in made.records
                         if record["kind"] == "generation" and record["uid"] == 0]  # fmt: skip
    assert members_over_time == [[*range(6)], [*range(5)]]
    assert at[2] < 5 + 2 + 3 + 2, "silent for so long, then without an answer for as long as is borne, and two rounds"
    assert all(made.nodes[uid].round > 30 for uid in range(NODES)) and rms_deviation(
        {uid: made.nodes[uid] for uid in range(NODES)}) < 0.01  # fmt: skip
    if way == "push_sum":
        assert total_mass(made, frozenset({5}))[1] == pytest.approx(NODES, abs=1e-9)


def test_a_slow_node_is_probed_and_stays_a_member() -> None:
    """Its rounds last longer than the silence that is allowed."""
    config = CONFIG.model_copy(update={"suspect_seconds": 0.4})
    made, world = make_world("gossip", rounds=60, config=config)
    probed: list[int] = []

    def record_silent_nodes(process: Process) -> None:
        if process.uid == 1 and process.facts.long_silent is not None:
            probed.extend(process.facts.long_silent[0])

    world.settled = record_silent_nodes
    run_to_end(world)
    assert 2 in probed and not [record for record in made.records if record["kind"] == "generation"]
