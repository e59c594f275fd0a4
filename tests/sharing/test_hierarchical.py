"""x <- (W_between kron J_within) x, with an L-th of the model on every link between groups."""

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
from tests.communication.contract import BATCHED, NETWORKED, nodes, together
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked
from tests.sharing.contract import draw, gossip, one_round

ROOT = Path(__file__).parents[2]
Groups = list[list[int]]


def consecutive(count: int, size: int) -> Groups:
    return [list(range(start, start + size)) for start in range(0, count * size, size)]


def rule(groups: Groups, **options: object) -> Sharing:
    config = Hierarchical.Config.model_validate({"name": "hierarchical", "groups": groups, **options})
    return make_sharing(config, [range(sum(map(len, groups)))])


def averaging(groups: Groups) -> np.ndarray:
    """The mean in every group: [n, n]."""
    n = sum(map(len, groups))
    p = np.zeros((n, n))
    for group in groups:
        p[np.ix_(group, group)] = 1 / len(group)
    return p


def mixed(groups: Groups, graph: Topology, models: list[Tensor], rounds: int = 3) -> np.ndarray:
    """Rounds without local steps; the models of all nodes, [n, P]."""
    rules = [rule(groups) for _ in models]
    for each, model in zip(rules, models, strict=True):
        each.payload_schema(model.numel(), model.dtype)
    for r in range(rounds):
        one_round(rules, models, graph, r, 0.0)
    return torch.stack(models).double().numpy()


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "size"), [(1, 4), (2, 2), (4, 3), (5, 1), (3, 4), (2, 7)])
@pytest.mark.parametrize("between", ["ring", "star", "exponential", "directed_one_peer_exponential"])
@pytest.mark.parametrize("elements", [1, 5, 64, 101])
def test_it_is_the_kronecker_product(count: int, size: int, between: str, elements: int) -> None:
    outer = make(between, nodes=count)
    graph = make("grouped", nodes=count * size, between={"name": between, "nodes": count})
    models = draw(count * size, elements)
    x = torch.stack(models).double().numpy()
    before = x.mean(0)
    for r in range(3):
        x = np.kron(outer.matrix(r), np.full((size, size), 1 / size)) @ x
    found = mixed(consecutive(count, size), graph, models)
    np.testing.assert_allclose(found, x, atol=1e-6)
    np.testing.assert_allclose(found.mean(0), before, atol=1e-6)
    for start in range(0, count * size, size):
        assert (found[start : start + size] == found[start]).all(), "a group agrees bit for bit"


@pytest.mark.parametrize(("name", "options", "groups"), [
    ("complete", {"nodes": 6}, [[5, 0], [3, 1], [2, 4]]), ("torus", {"nodes": 12, "rows": 3}, consecutive(3, 4)),
    ("hypercube", {"nodes": 8}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("hypercube", {"nodes": 8}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("one_peer_exponential", {"nodes": 8}, consecutive(4, 2)),
    ("alternating_exponential_ring", {"nodes": 12, "nodes_per_machine": 3}, consecutive(4, 3)),
])  # fmt: skip
def test_any_graph_that_suits(name: str, options: dict[str, object], groups: Groups) -> None:
    """P W P x: the mean in every group, then the graph's own W, then the mean in every group."""
    graph, p = make(name, **options), averaging(groups)
    models = draw(graph.num_nodes, 50)
    x = torch.stack(models).double().numpy()
    for r in range(4):
        x = p @ graph.matrix(r) @ p @ x
    np.testing.assert_allclose(mixed(groups, graph, models, 4), x, atol=1e-6)


def test_groups_of_one_are_full_sharing_bit_for_bit() -> None:
    graph, mine, theirs = make("regular", nodes=6, degree=3), draw(6, 40), draw(6, 40)
    mixed(consecutive(6, 1), graph, mine)
    gossip(lambda: Full(Full.Config()), graph, theirs, 3)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_weights_of_a_missing_member_return(lost: int) -> None:
    """In its group it counts for nothing and its shard stays with everybody; in others its mate keeps its own."""
    groups, graph = consecutive(3, 2), make("grouped", nodes=6, between={"name": "ring", "nodes": 3})
    models = draw(6, 8)
    start = torch.stack(models).double()
    rules = [rule(groups) for _ in models]
    one_round(rules, models, graph, 0, 0.0, frozenset({lost}))
    shards = [slice(0, 4), slice(4, 8)]
    half = torch.stack([start[group] for group in groups]).mean(1)
    here, rank = divmod(lost, 2)
    mate = lost ^ 1
    for uid, model in enumerate(models):
        if uid == lost:
            continue
        for k, shard in enumerate(shards):
            means = half[:, shard].clone()
            if k != rank:  # the mate of the missing one owns this shard, without its contribution
                means[here] = start[mate, shard]
                expected = means.mean(0)
            elif uid // 2 == here:  # nobody owns it
                expected = start[uid, shard]
            else:
                expected = means[uid // 2] * 2 / 3 + means[3 - here - uid // 2] / 3
            torch.testing.assert_close(model[shard].double(), expected, atol=1e-6, rtol=0)


def test_a_dead_member_has_no_part_in_the_plan() -> None:
    graph = make("grouped", nodes=6, between={"name": "ring", "nodes": 3})
    members = (0, 1, 3, 4, 5)
    each = rule(consecutive(3, 2))
    for uid in members:
        for phase in range(3):
            seen = each.plan(replace(view(graph, uid, 0, 1, members), phase=phase))
            assert 2 not in {*seen.neighbors, *seen.sources, *seen.weights}
            assert sum(seen.weights.values()) == pytest.approx(1)
            assert seen.weights.keys() == {uid, *seen.sources}


def run(
    graph: Topology, groups: Groups | None, transport: str = "inproc", elements: int = 50, rounds: int = 3,
    buffers: int = 0, **options: object,
) -> list[Node]:
    """A run of quadratics, by rule full without groups."""
    config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 0, **options})
    n = graph.num_nodes
    trainings = [Quadratic(u, elements, buffers=buffers) for u in range(n)]
    rules = [Full(Full.Config()) if groups is None else rule(groups) for _ in range(n)]
    with nodes(transport, n, schemas_of(rules[0], trainings[0].model)) as made:
        parts = [NodeParts(graph, trainings[u], rules[u], c) for u, c in enumerate(made)]
        built = [Node(u, config, each, seed=1) for u, each in enumerate(parts)]
        if transport == "inproc":
            step_all(built)
        else:
            together(made, lambda communication: built[communication.uid].run())
        return built


def models_of(built: list[Node]) -> Tensor:
    return stacked([node.training for node in built])  # type: ignore[misc]


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_every_transport_gives_the_bits_of_the_twin(transport: str, schedule: str) -> None:
    graph = make("grouped", nodes=6, between={"name": "line", "nodes": 3})
    groups = consecutive(3, 2)
    twin = run(graph, groups, buffers=3, schedule=schedule)
    networked = run(graph, groups, transport, buffers=3, schedule=schedule)
    assert torch.equal(models_of(twin), models_of(networked))
    buffers = [stacked([n.training for n in built], "buffers") for built in (twin, networked)]  # type: ignore[misc]
    assert torch.equal(*buffers)


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_a_run_is_full_sharing_over_the_same_graph(schedule: str) -> None:
    graph = make("grouped", nodes=12, between={"name": "ring", "nodes": 4})
    hierarchical = run(graph, consecutive(4, 3), schedule=schedule, buffers=3)
    full = run(graph, None, schedule=schedule, buffers=3)
    torch.testing.assert_close(models_of(hierarchical), models_of(full), atol=1e-6, rtol=0)
    both = [stacked([n.training for n in built], "buffers") for built in (hierarchical, full)]  # type: ignore[misc]
    assert torch.equal(*both)


@pytest.mark.parametrize(("transport", "count", "size"), [
    ("inproc", 4, 4), ("inproc", 2, 3), ("tcp", 2, 2), ("shared_memory", 2, 2), ("collective", 2, 2),
])  # fmt: skip
def test_every_byte_crosses_once(transport: str, count: int, size: int) -> None:
    """Between two groups: one model in each direction per round, where full sharing on a torus sends `size`."""
    elements, rounds = 240, 2
    graph = make("torus", nodes=count * size, rows=count)
    crossing = {}
    for name, groups in (("hierarchical", consecutive(count, size)), ("full", None)):
        built = run(graph, groups, transport, elements, rounds)
        crossing[name] = sum(
            edge.data_bytes_sent for node in built for uid, edge in node.communication.counters.edges.items()
            if uid // size != node.uid // size
        )  # fmt: skip
        if groups is not None:
            edges = built[0].communication.counters.edges
            inside = sum(edge.data_bytes_sent for uid, edge in edges.items() if uid < size)
            assert inside == rounds * 2 * (size - 1) * elements * 4 // size
    links = count if count > 2 else 1
    assert crossing["hierarchical"] == rounds * 2 * links * elements * 4
    assert crossing["hierarchical"] * size == crossing["full"]


@pytest.mark.parametrize("missing", ["fail", "return_weight"])
@pytest.mark.parametrize("until", [0, 1])
@pytest.mark.slow
def test_a_member_that_falls_silent(missing: str, until: int) -> None:
    """Node 3 sends in the phases up to `until` and in none after."""
    graph = make("grouped", nodes=4, between={"name": "ring", "nodes": 2})
    config = NodeConfig.model_validate({"rounds": 1, "evaluate_every": 0, "missing": missing})
    trainings = [Quadratic(u, 10) for u in range(4)]
    rules = [rule(consecutive(2, 2)) for _ in range(4)]
    named: list[tuple[int, ...]] = []
    with nodes("ipc", 4, schemas_of(rules[0], trainings[0].model), timeout_seconds=1.5) as made:
        parts = [NodeParts(graph, trainings[u], rules[u], c) for u, c in enumerate(made)]
        built = [Node(u, config, each, seed=1) for u, each in enumerate(parts)]

        def work(communication: Communication) -> None:
            node = built[communication.uid]
            try:
                node.begin_round(0)
                for phase in range(1, 1 + until if node.uid == 3 else 3):
                    node.next_phase(phase)
                if node.uid != 3:
                    node.finish_round(0)
            except PeerLost as error:
                named.append(error.missing)

        together(made, work)
    if missing == "fail":
        assert (3,) in named
        return
    x = stacked(trainings[:3])
    stepped = [Quadratic(u, 10) for u in range(4)]
    for each in stepped:
        each.local_update(0)
    low, high = stacked(stepped).amin(0) - 1e-6, stacked(stepped).amax(0) + 1e-6
    assert bool(((x >= low) & (x <= high)).all()) and not named
    assert torch.equal(x[0], x[1]), "nobody gives up on a node that is itself waiting for the silent one"


def said(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", sets)
    return str(caught.value)


PAIRS = "{name: hierarchical, groups: [[0, 1], [2, 3], [4, 5], [6, 7]]}"
EIGHT = ("mapping={machines: 1, nodes_per_machine: 8}", f"sharing={PAIRS}")


def test_what_does_not_suit_is_refused_with_advice() -> None:
    assert (
        "sharing: hierarchical needs a graph that treats all nodes of a group alike, but nodes 0 and 1 of one group "
        "give weights 0.000 and 0.333 to nodes 2, 3 in round 0; use {name: grouped, nodes: 8, between: {name: "
        "ring, nodes: 4}}"
    ) in said("graph={name: ring, nodes: 8}", *EIGHT)
    shuffled = "sharing.groups=[[1,0],[2,3],[4,5],[6,7]]"
    assert "; use {name: complete, nodes: 8}" in said("graph={name: ring, nodes: 8}", *EIGHT, shuffled)
    unequal = "sharing={name: hierarchical, groups: [[0,1,2],[3,4]]}"
    assert "sharing.groups must have one size, got 2 (nodes 3, 4) and 3 (nodes 0, 1, 2)" in said(
        "graph={name: complete, nodes: 5}", "mapping={machines: 1, nodes_per_machine: 5}", unequal)  # fmt: skip
    machines = "mapping={name: table, machines: [{nodes: 3, base_port: 7000}, {nodes: 2, base_port: 7100}]}"
    found = said("graph={name: complete, nodes: 5}", machines, "sharing={name: hierarchical}")
    assert "must have one size, got 2 (nodes 3, 4) and 3 (nodes 0, 1, 2)" in found
    assert "sharing.groups must name every node, got none with node 6, 7" in said(
        "graph={name: complete, nodes: 8}", EIGHT[0], f"sharing={PAIRS.replace(', [6, 7]', '')}")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_it_trains_and_groups_agree(schedule: str) -> None:
    sets = ["graph={name: grouped, nodes: 8, between: {name: ring, nodes: 4}}", *EIGHT,
            f"node={{rounds: 20, evaluate_every: 0, schedule: {schedule}}}"]  # fmt: skip
    torch.set_num_threads(1)
    built = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
    step_all(built)
    assert float(built[0].figures()["accuracy_mean"]) > 0.8
    x = models_of(built)
    assert schedule == "overlapped" or all(torch.equal(x[u], x[u + 1]) for u in range(0, 8, 2))


def test_compressed_it_mixes_up_to_the_codec() -> None:
    groups, graph = consecutive(2, 2), make("complete", nodes=4)
    models = draw(4, 60)
    mean = torch.stack(models).mean(0)
    rules = [rule(groups, compression={"name": "float16"}) for _ in models]
    for each, model in zip(rules, models, strict=True):
        each.payload_schema(model.numel(), model.dtype)
    one_round(rules, models, graph, 0, 0.0)
    for model in models:
        torch.testing.assert_close(model, mean, atol=1e-2, rtol=0)


@pytest.mark.parametrize("codec", ["float16", "int8", "int4", "sign"])
def test_compressed_its_groups_agree_bit_for_bit(codec: str) -> None:
    groups = consecutive(2, 3)
    graph = make("grouped", nodes=6, between={"name": "ring", "nodes": 2})
    models = draw(6, 61)
    rules = [rule(groups, compression={"name": codec}) for _ in models]
    for each, model in zip(rules, models, strict=True):
        each.payload_schema(model.numel(), model.dtype)
    for r in range(2):
        one_round(rules, models, graph, r, 0.0)
        assert all(torch.equal(models[group[0]], models[uid]) for group in groups for uid in group)


@pytest.mark.parametrize(("name", "options", "groups"), [
    ("torus", {"nodes": 12, "rows": 3}, consecutive(3, 4)), ("complete", {"nodes": 4}, consecutive(2, 2)),
    ("one_peer_exponential", {"nodes": 8}, consecutive(4, 2)),
])  # fmt: skip
def test_float_buffers_take_the_matrix_of_the_models(name: str, options: dict[str, object], groups: Groups) -> None:
    graph = make(name, **options)
    built = run(graph, groups, buffers=3, rounds=3)
    x, p = np.arange(float(graph.num_nodes)), averaging(groups)
    for r in range(3):
        x = p @ graph.matrix(r) @ p @ x
    found = stacked([n.training for n in built], "buffers")  # type: ignore[misc]
    np.testing.assert_allclose(found.double().numpy(), np.repeat(x[:, None], 3, 1), atol=1e-5)
    assert all(torch.equal(found[group[0]], found[uid]) for group in groups for uid in group)


def test_the_rule_is_told_its_groups() -> None:
    each = Hierarchical(Hierarchical.Config.model_validate({"name": "hierarchical"}))
    with pytest.raises(ValueError, match=r"groups must have one size, got 1 \(nodes 2\) and 2 \(nodes 0, 1\)"):
        each.set_machines([(0, 1), (2,)])
    assert isinstance(each.config, Config)
