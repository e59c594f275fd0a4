"""The rule hierarchical: x <- (W_between kron J_within) x. Between two groups of L nodes every link carries an L-th of
the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, schemas_of, step_all
from decentnode.communication.base import Communication
from decentnode.config.component import Config
from decentnode.errors import ConfigError, PeerLost
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.graph.topology import Topology
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.full import Full
from decentnode.sharing.hierarchical import Hierarchical
from tests.communication.contract import BATCHED, NETWORKED, open_nodes, run_on_all
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked
from tests.sharing.contract import random_models, run_round, run_rounds

ROOT = Path(__file__).parents[2]
Groups = list[list[int]]


def consecutive_groups(count: int, size: int) -> Groups:
    """Returns groups of nodes with consecutive uids: [[0, 1], [2, 3], ...] for size 2."""
    return [list(range(start, start + size)) for start in range(0, count * size, size)]


def rule(groups: Groups, **options: object) -> Sharing:
    config = Hierarchical.Config.model_validate({"name": "hierarchical", "groups": groups, **options})
    return make_sharing(config, [range(sum(map(len, groups)))])


def rules_for(models: list[Tensor], groups: Groups, **options: object) -> list[Sharing]:
    """Returns a rule per model that knows the model's size."""
    rules = [rule(groups, **options) for _ in models]
    for hierarchical, model in zip(rules, models, strict=True):
        hierarchical.payload_schema(model.numel(), model.dtype)
    return rules


def averaging_matrix(groups: Groups) -> np.ndarray:
    """Returns the matrix [n, n] that gives every node the mean of its group."""
    n = sum(map(len, groups))
    p = np.zeros((n, n))
    for group in groups:
        p[np.ix_(group, group)] = 1 / len(group)
    return p


def models_after_mixing(groups: Groups, graph: Topology, models: list[Tensor], rounds: int = 3) -> np.ndarray:
    """Returns the models of all nodes, [n, P], after rounds without local steps; changes `models` in place."""
    rules = rules_for(models, groups)
    for r in range(rounds):
        run_round(rules, models, graph, r, 0.0)
    return torch.stack(models).double().numpy()


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "size"), [(1, 4), (2, 2), (4, 3), (5, 1), (3, 4), (2, 7)])
@pytest.mark.parametrize("between", ["ring", "star", "exponential", "directed_one_peer_exponential"])
@pytest.mark.parametrize("elements", [1, 5, 64, 101])
def test_mixing_is_the_kronecker_product_of_the_graph_of_groups_and_averaging(
    count: int, size: int, between: str, elements: int
) -> None:
    outer = make(between, nodes=count)
    graph = make("grouped", nodes=count * size, between={"name": between, "nodes": count})
    models = random_models(count * size, elements)
    x = torch.stack(models).double().numpy()
    before = x.mean(0)
    for r in range(3):
        x = np.kron(outer.matrix(r), np.full((size, size), 1 / size)) @ x
    mixed = models_after_mixing(consecutive_groups(count, size), graph, models)
    np.testing.assert_allclose(mixed, x, atol=1e-6)
    np.testing.assert_allclose(mixed.mean(0), before, atol=1e-6)
    for start in range(0, count * size, size):
        assert (mixed[start : start + size] == mixed[start]).all(), "members of a group differ"


@pytest.mark.parametrize(("name", "options", "groups"), [
    ("complete", {"nodes": 6}, [[5, 0], [3, 1], [2, 4]]), ("torus", {"nodes": 12, "rows": 3}, consecutive_groups(3, 4)),
    ("hypercube", {"nodes": 8}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("hypercube", {"nodes": 8}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("one_peer_exponential", {"nodes": 8}, consecutive_groups(4, 2)),
    ("alternating_exponential_ring", {"nodes": 12, "nodes_per_machine": 3}, consecutive_groups(4, 3)),
])  # fmt: skip
def test_mixing_on_graphs_that_treat_group_members_alike(
    name: str, options: dict[str, object], groups: Groups
) -> None:
    """A round computes P W P x: averaging in every group, the graph's own W, and averaging again."""
    graph, p = make(name, **options), averaging_matrix(groups)
    models = random_models(graph.num_nodes, 50)
    x = torch.stack(models).double().numpy()
    for r in range(4):
        x = p @ graph.matrix(r) @ p @ x
    np.testing.assert_allclose(models_after_mixing(groups, graph, models, 4), x, atol=1e-6)


def test_groups_of_one_are_full_sharing_bit_for_bit() -> None:
    graph, hierarchical, full = make("regular", nodes=6, degree=3), random_models(6, 40), random_models(6, 40)
    models_after_mixing(consecutive_groups(6, 1), graph, hierarchical)
    run_rounds(lambda: Full(Full.Config()), graph, full, 3)
    assert all(torch.equal(a, b) for a, b in zip(hierarchical, full, strict=True))


@pytest.mark.parametrize("missing_uid", [0, 1, 4])
def test_weights_of_a_missing_member_are_added_to_those_that_remain(missing_uid: int) -> None:
    """In groups of two, of each of which a node owns a shard of the model: the other member of the group owns its shard
    alone; in the missing node's own shard the group keeps what it has, and other groups leave that group out."""
    groups, graph = consecutive_groups(3, 2), make("grouped", nodes=6, between={"name": "ring", "nodes": 3})
    models = random_models(6, 8)
    start = torch.stack(models).double()
    rules = [rule(groups) for _ in models]
    run_round(rules, models, graph, 0, 0.0, frozenset({missing_uid}))
    shards = [slice(0, 4), slice(4, 8)]
    half = torch.stack([start[group] for group in groups]).mean(1)
    group, rank = divmod(missing_uid, 2)
    other_member = missing_uid ^ 1
    for uid, model in enumerate(models):
        if uid == missing_uid:
            continue
        for k, shard in enumerate(shards):
            means = half[:, shard].clone()
            if k != rank:  # the other member owns this shard, and averages without the missing one
                means[group] = start[other_member, shard]
                expected = means.mean(0)
            elif uid // 2 == group:  # the owner is missing
                expected = start[uid, shard]
            else:
                expected = means[uid // 2] * 2 / 3 + means[3 - group - uid // 2] / 3
            torch.testing.assert_close(model[shard].double(), expected, atol=1e-6, rtol=0)


def test_plans_leave_out_a_node_that_is_not_in_the_generation() -> None:
    graph = make("grouped", nodes=6, between={"name": "ring", "nodes": 3})
    members = (0, 1, 3, 4, 5)
    hierarchical = rule(consecutive_groups(3, 2))
    for uid in members:
        for phase in range(3):
            round_view = hierarchical.plan(replace(view(graph, uid, 0, 1, members), phase=phase))
            assert 2 not in {*round_view.neighbors, *round_view.sources, *round_view.weights}
            assert sum(round_view.weights.values()) == pytest.approx(1)
            assert round_view.weights.keys() == {uid, *round_view.sources}


def run_quadratics(
    graph: Topology, groups: Groups | None, transport: str = "inproc", elements: int = 50, rounds: int = 3,
    buffers: int = 0, **options: object,
) -> list[Node]:
    """Runs nodes that train on quadratics, and returns them. groups: None for the rule full. options: keys of
    `node`."""
    config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 0, **options})
    n = graph.num_nodes
    trainings = [Quadratic(u, elements, buffers=buffers) for u in range(n)]
    rules = [Full(Full.Config()) if groups is None else rule(groups) for _ in range(n)]
    with open_nodes(transport, n, schemas_of(rules[0], trainings[0].model)) as made:
        nodes_of_run = [Node(uid, config, NodeParts(graph, trainings[uid], rules[uid], communication), seed=1)
                        for uid, communication in enumerate(made)]  # fmt: skip
        if transport == "inproc":
            step_all(nodes_of_run)
        else:
            run_on_all(made, lambda communication: nodes_of_run[communication.uid].run())
        return nodes_of_run


def stacked_models(nodes_of_run: list[Node]) -> Tensor:
    return stacked([node.training for node in nodes_of_run])  # type: ignore[misc]


def stacked_buffers(nodes_of_run: list[Node]) -> Tensor:
    return stacked([node.training for node in nodes_of_run], "buffers")  # type: ignore[misc]


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_every_transport_gives_the_same_bits_as_inproc(transport: str, schedule: str) -> None:
    graph = make("grouped", nodes=6, between={"name": "line", "nodes": 3})
    groups = consecutive_groups(3, 2)
    in_process = run_quadratics(graph, groups, buffers=3, schedule=schedule)
    networked = run_quadratics(graph, groups, transport, buffers=3, schedule=schedule)
    assert torch.equal(stacked_models(in_process), stacked_models(networked))
    assert torch.equal(stacked_buffers(in_process), stacked_buffers(networked))


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_on_a_graph_of_groups_hierarchical_computes_what_full_does(schedule: str) -> None:
    graph = make("grouped", nodes=12, between={"name": "ring", "nodes": 4})
    hierarchical = run_quadratics(graph, consecutive_groups(4, 3), schedule=schedule, buffers=3)
    full = run_quadratics(graph, None, schedule=schedule, buffers=3)
    torch.testing.assert_close(stacked_models(hierarchical), stacked_models(full), atol=1e-6, rtol=0)
    assert torch.equal(stacked_buffers(hierarchical), stacked_buffers(full))


@pytest.mark.parametrize(("transport", "count", "size"), [
    ("inproc", 4, 4), ("inproc", 2, 3), ("tcp", 2, 2), ("shared_memory", 2, 2), ("collective", 2, 2),
])  # fmt: skip
def test_between_two_groups_one_model_is_sent_in_each_direction(transport: str, count: int, size: int) -> None:
    """Where full on the same torus sends `size` models."""
    elements, rounds = 240, 2
    graph = make("torus", nodes=count * size, rows=count)
    crossing = {}
    for name, groups in (("hierarchical", consecutive_groups(count, size)), ("full", None)):
        nodes_of_run = run_quadratics(graph, groups, transport, elements, rounds)
        crossing[name] = sum(
            edge.data_bytes_sent for node in nodes_of_run for uid, edge in node.communication.counters.edges.items()
            if uid // size != node.uid // size
        )  # fmt: skip
        if groups is not None:
            edges = nodes_of_run[0].communication.counters.edges
            inside = sum(edge.data_bytes_sent for uid, edge in edges.items() if uid < size)
            assert inside == rounds * 2 * (size - 1) * elements * 4 // size
    links = count if count > 2 else 1
    assert crossing["hierarchical"] == rounds * 2 * links * elements * 4
    assert crossing["hierarchical"] * size == crossing["full"]


@pytest.mark.parametrize("missing", ["fail", "return_weight"])
@pytest.mark.parametrize("until", [0, 1])
@pytest.mark.slow
def test_a_node_that_stops_sending_between_phases_is_handled_as_configured(missing: str, until: int) -> None:
    """Node 3 sends in the phases up to `until` and in none after: the others name it as missing, or mix without it."""
    graph = make("grouped", nodes=4, between={"name": "ring", "nodes": 2})
    config = NodeConfig.model_validate({"rounds": 1, "evaluate_every": 0, "missing": missing})
    trainings = [Quadratic(u, 10) for u in range(4)]
    rules = [rule(consecutive_groups(2, 2)) for _ in range(4)]
    reported_missing: list[tuple[int, ...]] = []
    with open_nodes("ipc", 4, schemas_of(rules[0], trainings[0].model), timeout_seconds=1.5) as made:
        nodes_of_run = [Node(uid, config, NodeParts(graph, trainings[uid], rules[uid], communication), seed=1)
                        for uid, communication in enumerate(made)]  # fmt: skip

        def work(communication: Communication) -> None:
            node = nodes_of_run[communication.uid]
            try:
                node.begin_round(0)
                for phase in range(1, 1 + until if node.uid == 3 else 3):
                    node.next_phase(phase)
                if node.uid != 3:
                    node.finish_round(0)
            except PeerLost as error:
                reported_missing.append(error.missing)

        run_on_all(made, work)
    if missing == "fail":
        assert (3,) in reported_missing
        return
    x = stacked(trainings[:3])
    stepped = [Quadratic(u, 10) for u in range(4)]
    for training in stepped:
        training.local_update(0)
    low, high = stacked(stepped).amin(0) - 1e-6, stacked(stepped).amax(0) + 1e-6
    assert bool(((x >= low) & (x <= high)).all()) and not reported_missing
    assert torch.equal(x[0], x[1]), "a node was left out that was itself waiting for node 3"


def error_message(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", sets)
    return str(caught.value)


PAIRS = "{name: hierarchical, groups: [[0, 1], [2, 3], [4, 5], [6, 7]]}"
EIGHT_NODES = ("mapping={machines: 1, nodes_per_machine: 8}", f"sharing={PAIRS}")


def test_groups_that_do_not_fit_the_graph_are_refused_with_advice() -> None:
    assert (
        "sharing: hierarchical needs a graph that treats all nodes of a group alike, but nodes 0 and 1 of one group "
        "give weights 0.000 and 0.333 to nodes 2, 3 in round 0; use {name: grouped, nodes: 8, between: {name: "
        "ring, nodes: 4}}"
    ) in error_message("graph={name: ring, nodes: 8}", *EIGHT_NODES)
    shuffled = "sharing.groups=[[1,0],[2,3],[4,5],[6,7]]"
    assert "; use {name: complete, nodes: 8}" in error_message("graph={name: ring, nodes: 8}", *EIGHT_NODES, shuffled)
    unequal = "sharing={name: hierarchical, groups: [[0,1,2],[3,4]]}"
    assert "sharing.groups must have one size, got 2 (nodes 3, 4) and 3 (nodes 0, 1, 2)" in error_message(
        "graph={name: complete, nodes: 5}", "mapping={machines: 1, nodes_per_machine: 5}", unequal)  # fmt: skip
    machines = "mapping={name: table, machines: [{nodes: 3, base_port: 7000}, {nodes: 2, base_port: 7100}]}"
    message = error_message("graph={name: complete, nodes: 5}", machines, "sharing={name: hierarchical}")
    assert "must have one size, got 2 (nodes 3, 4) and 3 (nodes 0, 1, 2)" in message
    assert "sharing.groups must name every node, got none with node 6, 7" in error_message(
        "graph={name: complete, nodes: 8}", EIGHT_NODES[0], f"sharing={PAIRS.replace(', [6, 7]', '')}")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_hierarchical_trains_the_quickstart_and_members_of_a_group_agree(schedule: str) -> None:
    sets = ["graph={name: grouped, nodes: 8, between: {name: ring, nodes: 4}}", *EIGHT_NODES,
            f"node={{rounds: 20, evaluate_every: 0, schedule: {schedule}}}"]  # fmt: skip
    torch.set_num_threads(1)
    nodes_of_run = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
    step_all(nodes_of_run)
    assert float(nodes_of_run[0].figures()["accuracy_mean"]) > 0.8
    x = stacked_models(nodes_of_run)
    assert schedule == "overlapped" or all(torch.equal(x[u], x[u + 1]) for u in range(0, 8, 2))


def test_with_a_codec_models_are_mixed_up_to_its_error() -> None:
    groups, graph = consecutive_groups(2, 2), make("complete", nodes=4)
    models = random_models(4, 60)
    mean = torch.stack(models).mean(0)
    rules = rules_for(models, groups, compression={"name": "float16"})
    run_round(rules, models, graph, 0, 0.0)
    for model in models:
        torch.testing.assert_close(model, mean, atol=1e-2, rtol=0)


@pytest.mark.parametrize("codec", ["float16", "int8", "int4", "sign"])
def test_with_a_codec_members_of_a_group_agree_bit_for_bit(codec: str) -> None:
    groups = consecutive_groups(2, 3)
    graph = make("grouped", nodes=6, between={"name": "ring", "nodes": 2})
    models = random_models(6, 61)
    rules = rules_for(models, groups, compression={"name": codec})
    for r in range(2):
        run_round(rules, models, graph, r, 0.0)
        assert all(torch.equal(models[group[0]], models[uid]) for group in groups for uid in group)


@pytest.mark.parametrize(("name", "options", "groups"), [
    ("torus", {"nodes": 12, "rows": 3}, consecutive_groups(3, 4)), ("complete", {"nodes": 4}, consecutive_groups(2, 2)),
    ("one_peer_exponential", {"nodes": 8}, consecutive_groups(4, 2)),
])  # fmt: skip
def test_float_buffers_are_mixed_with_the_same_matrix_as_models(
    name: str, options: dict[str, object], groups: Groups
) -> None:
    graph = make(name, **options)
    nodes_of_run = run_quadratics(graph, groups, buffers=3, rounds=3)
    x, p = np.arange(float(graph.num_nodes)), averaging_matrix(groups)
    for r in range(3):
        x = p @ graph.matrix(r) @ p @ x
    buffers = stacked_buffers(nodes_of_run)
    np.testing.assert_allclose(buffers.double().numpy(), np.repeat(x[:, None], 3, 1), atol=1e-5)
    assert all(torch.equal(buffers[group[0]], buffers[uid]) for group in groups for uid in group)


def test_machines_of_unequal_size_are_refused_as_default_groups() -> None:
    hierarchical = Hierarchical(Hierarchical.Config.model_validate({"name": "hierarchical"}))
    with pytest.raises(ValueError, match=r"groups must have one size, got 1 \(nodes 2\) and 2 \(nodes 0, 1\)"):
        hierarchical.set_machines([(0, 1), (2,)])
    assert isinstance(hierarchical.config, Config)
