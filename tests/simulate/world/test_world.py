"""Whole nodes in a simulated world: without faults they have the bits of nodes in process; a seed repeats a run."""

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
from tests.simulate.world.runs import CONFIG, NodeRun

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
NODES, LIMIT = 6, 1e4
EXACT = ("full", "d2", "gradient_tracking atc", "relaysgd", "push_sum", "choco", "powergossip", "topk", "hierarchical",
         "full+zstd of int4", "local_sgd", "deepsqueeze+int8")  # fmt: skip


def model_and_merged(node: Node) -> torch.Tensor:
    model = node.training.model
    assert node.merged is not None
    return torch.cat([model.parameters, model.buffers, node.merged])


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_models_in_a_world_have_the_bits_of_those_in_process(name: str, schedule: str) -> None:
    rule: Callable[[], Sharing] = RULES[name]
    if schedule == "overlapped" and rule().requirements.sequential:
        pytest.skip("needs the sequential schedule")
    graph = suitable_graph(rule(), NODES)
    in_process = NodeRun(graph, rule, buffers=3, schedule=schedule).in_process()
    in_world = NodeRun(graph, rule, buffers=3, schedule=schedule)
    world = in_world.world(seed=1, compute_seconds=lambda uid, round: 0.1 + 0.05 * ((uid + round) % 3))
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    for uid in range(NODES):
        assert torch.equal(model_and_merged(in_world.nodes[uid]), model_and_merged(in_process.nodes[uid]))
        assert in_world.nodes[uid].evaluation == in_process.nodes[uid].evaluation
    assert in_world.nodes[0].reports.keys() == set(range(NODES))
    assert world.heap.now > 6 * 0.1


def test_an_experiment_from_a_file_has_the_same_bits_in_a_world_and_in_process() -> None:
    experiment = load(QUICKSTART, ["graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4", "node.rounds=3",
                                   "node.evaluate_every=2"])  # fmt: skip
    twins = build_in_process(experiment)
    step_all(twins)
    nodes: dict[int, Node] = {}

    def make_node(uid: int, make_communication: Callable[..., object]) -> Node:
        node = nodes[uid] = build(experiment, uid, make_communication)  # type: ignore[arg-type]
        return node

    assert World(Setting(4, CONFIG), make_node).run(LIMIT)
    for in_process in twins:
        assert torch.equal(model_and_merged(nodes[in_process.uid]), model_and_merged(in_process))


def run_with_lossy_links(seed: int) -> tuple[list[tuple[float, object, object]], float, int, torch.Tensor]:
    """Returns when which node made which record, the virtual time at the end, the number of events, and the models."""
    run = NodeRun(make("ring", nodes=5), RULES["full"], missing="regroup")
    faults = Faults(links=Link(loss=0.05, duplication=0.05, reordering=0.05, damage=0.05), lossy_seconds=5.0)
    world = run.world(seed=seed, faults=faults, limits=Limits(3.0, 20.0, 3, 6), starts_within_seconds=1.0)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    records = [(record["time"], record["uid"], record["kind"]) for record in run.records]
    models = torch.cat([model_and_merged(node) for node in run.nodes.values()])
    return records, world.heap.now, world.heap.count, models


def test_two_runs_with_the_same_seed_are_equal_and_runs_with_different_seeds_differ() -> None:
    (records, *numbers, models), (records_2, *numbers_2, models_2) = (run_with_lossy_links(3) for _ in range(2))
    assert records == records_2 and numbers == numbers_2 and torch.equal(models, models_2)
    assert run_with_lossy_links(4)[0] != records


def test_large_models_that_are_sent_in_chunks_from_their_own_memory_have_the_bits_of_those_in_process() -> None:
    """On slow links, so that nodes must wait until the memory is no longer leased."""
    elements = (1 << 18) + 77
    graph = make("ring", nodes=4)
    config = ZeroMQConfig(name="zeromq", checksum="xxh3", chunk_bytes=1 << 16)
    in_process = NodeRun(graph, RULES["full"], elements=elements).in_process()
    in_world = NodeRun(graph, RULES["full"], elements=elements)
    slow = Faults(links=Link(bytes_per_second=3e7))
    assert in_world.world(config=config, faults=slow).run(LIMIT)
    for uid in range(4):
        assert torch.equal(model_and_merged(in_world.nodes[uid]), model_and_merged(in_process.nodes[uid]))
