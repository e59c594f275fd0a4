"""The contract of all graphs: cases of every family, and checks that each of them must pass."""

from __future__ import annotations

import numpy as np

from decentnode.config.component import load_class
from decentnode.graph import GRAPHS
from decentnode.graph.topology import Topology

CASES: list[tuple[str, dict[str, object]]] = [
    ("ring", {"nodes": 1}), ("ring", {"nodes": 2}), ("ring", {"nodes": 7}),
    ("torus", {"nodes": 12}), ("torus", {"nodes": 4}), ("torus", {"nodes": 5}),
    ("star", {"nodes": 6}), ("complete", {"nodes": 5}), ("complete", {"nodes": 1}), ("line", {"nodes": 6}),
    ("tree", {"nodes": 10, "branching": 3}), ("regular", {"nodes": 16, "degree": 4}),
    ("regular", {"nodes": 6, "degree": 5}), ("small_world", {"nodes": 12}),
    ("erdos_renyi", {"nodes": 12, "probability": 0.4}), ("hypercube", {"nodes": 16}),
    ("exponential", {"nodes": 13}), ("exponential", {"nodes": 2}),
    ("one_peer_exponential", {"nodes": 8}), ("one_peer_exponential", {"nodes": 1}),
    ("directed_one_peer_exponential", {"nodes": 11}), ("alternating_ring", {"nodes": 8}),
    ("alternating_ring", {"nodes": 2}), ("alternating_exponential_ring", {"nodes": 12, "nodes_per_machine": 3}),
    ("random_matching", {"nodes": 9}), ("random_regular", {"nodes": 10, "degree": 3}),
    ("random_regular", {"nodes": 2, "degree": 1}), ("random_regular", {"nodes": 9, "degree": 6}),
    ("random_regular", {"nodes": 300}), ("el_local", {"nodes": 10, "degree": 3}), ("el_local", {"nodes": 300}),
    ("el_local", {"nodes": 2, "degree": 1}),
    ("base_k_plus_1", {"nodes": 7}), ("base_k_plus_1", {"nodes": 25, "peers": 4}),
    ("matcha", {"nodes": 9, "base": {"name": "torus", "nodes": 9}}),
    ("matcha", {"nodes": 1, "base": {"name": "ring", "nodes": 1}}),
    ("matcha", {"nodes": 10, "base": {"name": "tree", "nodes": 10}, "budget": 0.8}),
    ("d_equistatic", {"nodes": 1}), ("d_equistatic", {"nodes": 2}), ("d_equistatic", {"nodes": 12, "degree": 1}),
    ("d_equistatic", {"nodes": 17}), ("u_equistatic", {"nodes": 2}), ("u_equistatic", {"nodes": 9, "degree": 2}),
    ("u_equistatic", {"nodes": 12, "degree": 5}), ("u_equistatic", {"nodes": 1}), ("od_equidyn", {"nodes": 11}),
    ("od_equidyn", {"nodes": 1}), ("od_equidyn", {"nodes": 12, "offsets": 3}), ("ou_equidyn", {"nodes": 2}),
    ("ou_equidyn", {"nodes": 9}), ("ou_equidyn", {"nodes": 12, "offsets": 2}), ("ou_equidyn", {"nodes": 1}),
    ("gossip_pga", {"nodes": 9, "base": {"name": "torus", "nodes": 9}, "every": 3}),
    ("gossip_pga", {"nodes": 1, "base": {"name": "ring", "nodes": 1}}),
    ("gossip_pga", {"nodes": 7, "base": {"name": "random_matching", "nodes": 7},
                    "average": {"name": "base_k_plus_1", "nodes": 7}}),
    ("gossip_pga", {"nodes": 8, "base": {"name": "directed_one_peer_exponential", "nodes": 8}, "every": 3}),
    ("grouped", {"nodes": 12, "between": {"name": "ring", "nodes": 4}}),
    ("grouped", {"nodes": 3, "between": {"name": "line", "nodes": 3}}),
    ("grouped", {"nodes": 8, "between": {"name": "directed_one_peer_exponential", "nodes": 4}}),
]  # fmt: skip
MEAN_IN_EXPECTATION = {"el_local"}
"""Families that keep the mean of all models only in expectation."""


def make(name: str, seed: int = 1, weights: object = None, **options: object) -> Topology:
    """Returns a graph of a family. options: the keys of its section; weights: a rule of weights, else the default."""
    family = load_class(name, GRAPHS, "graph")
    graph: Topology = family(family.Config.model_validate({"name": name, **options}), seed=seed, weights=weights)
    return graph


def rounds_of(graph: Topology) -> range:
    """Returns a whole period and one round more, or five rounds of a graph without a period."""
    return range(graph.period + 1 if graph.period else 5)


def check_lists(graph: Topology) -> None:
    """Checks that lists are ascending and without self-loops, that every neighbor has the node as a source, and that
    sources and neighbors are the same if the graph is undirected."""
    n = graph.num_nodes
    for r in rounds_of(graph):
        for uid in range(n):
            out = graph.neighbors(uid, r)
            assert list(out) == sorted(set(out)) and uid not in out and all(0 <= j < n for j in out)
            assert all(uid in graph.sources(j, r) for j in out)
            if not graph.directed:
                assert graph.sources(uid, r) == out


def check_weights(graph: Topology) -> None:
    """Checks that rows, over the sources and the node itself, and out-weights sum to one; columns too, unless the mean
    is only kept in expectation."""
    for r in rounds_of(graph):
        matrix = graph.matrix(r)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)
        if graph.config.name not in MEAN_IN_EXPECTATION:
            np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-12)
        assert (matrix >= -1e-15).all()
        for uid in range(graph.num_nodes):
            row = graph.weights(uid, r)
            assert list(row) == sorted(row) and set(row) <= {uid, *graph.sources(uid, r)} and uid in row
            assert abs(sum(graph.out_weights(uid, r).values()) - 1) < 1e-12


def check_connected(graph: Topology) -> None:
    """Checks that information from every node reaches every other within 40 periods (40 rounds without a period)."""
    n = graph.num_nodes
    reach = np.eye(n, dtype=bool)
    for r in range(40 * (graph.period or 1)):
        reach = (graph.matrix(r) > 0) @ reach
        if reach.all():
            return
    raise AssertionError("information from some node does not reach all others")


def check_partners(graph: Topology) -> None:
    """Checks that `partners` is exactly the set of nodes that a node ever exchanges with, with all members or without
    one, on both ends; None for graphs without a period."""
    exchanged_with: dict[int, set[int]] = {uid: set() for uid in range(graph.num_nodes)}
    for r in range(2 * (graph.period or 1)):
        for uid, others in exchanged_with.items():
            alive = set(range(graph.num_nodes)) - {(uid + 1) % graph.num_nodes} | {uid}
            for members in (None, alive):
                others |= {*graph.neighbors(uid, r, members), *graph.sources(uid, r, members)}
    for uid, others in exchanged_with.items():
        assert graph.partners(uid) == (None if graph.period is None else others)
        assert all(uid in (graph.partners(other) or {uid}) for other in others)


def check_same_everywhere(graph: Topology, again: Topology) -> None:
    """Checks that a second object with the same parameters gives the same results, in any order of calls."""
    for r in reversed(rounds_of(graph)):
        for uid in range(graph.num_nodes):
            assert graph.neighbors(uid, r) == again.neighbors(uid, r)
            assert graph.weights(uid, r) == again.weights(uid, r)


def check_members(graph: Topology) -> None:
    """Checks that edges to an absent node disappear on both ends, and that its weight goes to the receiver itself."""
    alive = set(range(graph.num_nodes)) - {0}
    for uid in sorted(alive):
        full, row = graph.weights(uid, 0), graph.weights(uid, 0, alive)
        assert 0 not in row and 0 not in graph.neighbors(uid, 0, alive)
        assert abs(sum(row.values()) - 1) < 1e-12
        assert abs(row[uid] - full[uid] - full.get(0, 0)) < 1e-12
    assert graph.neighbors(0, 0, alive) == () and graph.weights(0, 0, alive) == {0: 1.0}
