"""Whole nodes in a world without faults: the bits of the in-process twin, and one seed runs alike every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decentnode.build import build, build_in_process, step_all
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.experiment import load
from decentnode.faults import Faults, Link
from decentnode.node.node import Node
from decentnode.sharing.base import Sharing
from decentnode.simulate.world.world import Setting, World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.sharing.contract import RULES, suitable_graph
from tests.simulate.world.runs import CONFIG, Made

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
NODES, LIMIT = 6, 1e4
EXACT = ("full", "d2", "gradient_tracking atc", "relaysgd", "push_sum", "choco", "powergossip", "topk", "hierarchical",
         "full+zstd of int4", "local_sgd", "deepsqueeze+int8")  # fmt: skip


def state_of(node: Node) -> torch.Tensor:
    model = node.training.model
    assert node.merged is not None
    return torch.cat([model.parameters, model.buffers, node.merged])


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_every_rule_has_the_bits_of_the_twin(name: str, schedule: str) -> None:
    rule: Callable[[], Sharing] = RULES[name]
    if schedule == "overlapped" and rule().requirements.sequential:
        pytest.skip("needs the sequential schedule")
    graph = suitable_graph(rule(), NODES)
    twin = Made(graph, rule, buffers=3, schedule=schedule).in_process()
    here = Made(graph, rule, buffers=3, schedule=schedule)
    world = here.world(seed=1, compute_seconds=lambda uid, round: 0.1 + 0.05 * ((uid + round) % 3))
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    for uid in range(NODES):
        assert torch.equal(state_of(here.nodes[uid]), state_of(twin.nodes[uid]))
        assert here.nodes[uid].evaluation == twin.nodes[uid].evaluation
    assert here.nodes[0].reports.keys() == set(range(NODES))
    assert world.heap.now > 6 * 0.1


def test_a_configured_experiment_has_the_bits_of_a_dry_run() -> None:
    experiment = load(QUICKSTART, ["graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4", "node.rounds=3",
                                   "node.evaluate_every=2"])  # fmt: skip
    twins = build_in_process(experiment)
    step_all(twins)
    nodes: dict[int, Node] = {}

    def make_node(uid: int, make_communication: Callable[..., object]) -> Node:
        node = nodes[uid] = build(experiment, uid, make_communication)  # type: ignore[arg-type]
        return node

    assert World(Setting(4, CONFIG), make_node).run(LIMIT)
    for twin in twins:
        assert torch.equal(state_of(nodes[twin.uid]), state_of(twin))


def story_of(seed: int) -> tuple[list[tuple[float, object, object]], float, int, torch.Tensor]:
    made = Made(make("ring", nodes=5), RULES["full"], missing="regroup")
    faults = Faults(links=Link(loss=0.05, duplication=0.05, reordering=0.05, damage=0.05), lossy_seconds=5.0)
    world = made.world(seed=seed, faults=faults, limits=Limits(3.0, 20.0, 3, 6), starts_within_seconds=1.0)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    told = [(record["time"], record["uid"], record["kind"]) for record in made.records]
    return told, world.heap.now, world.heap.count, torch.cat([state_of(node) for node in made.nodes.values()])


def test_a_seed_runs_alike_every_time() -> None:
    (one, *numbers, models), (two, *again, same) = story_of(3), story_of(3)
    assert one == two and numbers == again and torch.equal(models, same)
    assert story_of(4)[0] != one


def test_payloads_of_several_chunks_and_models_that_are_sent_from_where_they_lie_have_the_same_bits() -> None:
    """A slow link, so that leases are waited for."""
    elements = (1 << 18) + 77
    graph = make("ring", nodes=4)
    config = ZeroMQConfig(name="zeromq", checksum="xxh3", chunk_bytes=1 << 16)
    twin = Made(graph, RULES["full"], elements=elements).in_process()
    here = Made(graph, RULES["full"], elements=elements)
    slow = Faults(links=Link(bytes_per_second=3e7))
    assert here.world(config=config, faults=slow).run(LIMIT)
    for uid in range(4):
        assert torch.equal(state_of(here.nodes[uid]), state_of(twin.nodes[uid]))
