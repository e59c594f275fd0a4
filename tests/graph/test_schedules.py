"""Graphs that change from round to round: which average exactly, and how long their periods are."""

from __future__ import annotations

import numpy as np
import pytest

from decentnode.graph.base import view
from decentnode.graph.topology import Topology
from tests.graph.contract import make

# measured lengths of the base-(k+1) sequences: docs/explanation/graphs.rst, "What is exact when"
LENGTHS = {
    1: {3: 3, 5: 5, 6: 4, 7: 5, 9: 7, 10: 6, 12: 5, 15: 7, 16: 4, 20: 7, 25: 9, 33: 11, 50: 10},
    2: {5: 3, 9: 2, 25: 6, 50: 7},
    4: {5: 1, 25: 2, 50: 3},
}


def product_over_a_period(graph: Topology, start: int = 0) -> np.ndarray:
    w = np.eye(graph.num_nodes)
    for r in range(start, start + (graph.period or 0)):
        w = graph.matrix(r) @ w
    return w


def assert_exact(graph: Topology, start: int = 0) -> None:
    np.testing.assert_allclose(product_over_a_period(graph, start), 1 / graph.num_nodes, atol=1e-12)


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 7])
def test_base_graphs_average_exactly_for_every_number_of_nodes(peers: int) -> None:
    for n in range(1, 65):
        graph = make("base_k_plus_1", nodes=n, peers=peers)
        assert_exact(graph)
        assert max(len(graph.neighbors(u, r)) for u in range(n) for r in range(graph.period or 1)) <= peers
        for r in range(graph.period or 1):
            w = graph.matrix(r)
            assert np.array_equal(w, w.T)


@pytest.mark.parametrize("peers", LENGTHS)
def test_base_graphs_have_the_published_periods(peers: int) -> None:
    for n, length in LENGTHS[peers].items():
        assert make("base_k_plus_1", nodes=n, peers=peers).period == length


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_one_peer_exponential_graphs_are_exact_for_powers_of_two(n: int) -> None:
    for name in ("one_peer_exponential", "directed_one_peer_exponential"):
        graph = make(name, nodes=n)
        assert graph.period == max(1, n.bit_length() - 1)
        for start in range(graph.period or 1):
            assert_exact(graph, start)


def test_the_directed_one_peer_exponential_graph_is_not_exact_for_other_numbers_of_nodes() -> None:
    """Residuals .22 for 6 nodes and .21 for 12 (docs/explanation/graphs.rst, "What is exact when")."""
    for n, residual in ((6, 0.22), (12, 0.21)):
        distance = np.linalg.norm(product_over_a_period(make("directed_one_peer_exponential", nodes=n)) - 1 / n, 2)
        assert distance == pytest.approx(residual, abs=0.01)


@pytest.mark.parametrize("machines", [2, 4, 8, 16])
@pytest.mark.parametrize("per_machine", [2, 3])
def test_the_alternating_exponential_ring_is_exact_and_uses_half_of_the_machines_networks(
    machines: int, per_machine: int
) -> None:
    n = machines * per_machine
    graph = make("alternating_exponential_ring", nodes=n, nodes_per_machine=per_machine)
    assert graph.period == 2 * (machines.bit_length() - 1)
    assert_exact(graph)
    for r in range(graph.period):
        crossing = {u // per_machine for u in range(n) for j in graph.neighbors(u, r)
                    if u // per_machine != j // per_machine}
        assert len(crossing) == (machines // 2 if machines > 2 else 2 * r)  # half of the machines send to others


def test_random_matchings_pair_all_nodes_and_differ_from_round_to_round() -> None:
    graph = make("random_matching", nodes=10)
    seen = set()
    for r in range(50):
        pairs = {tuple(sorted((u, *graph.neighbors(u, r)))) for u in range(10)}
        assert len(pairs) == 5
        seen.add(frozenset(pairs))
    assert len(seen) > 40
    assert sum(not make("random_matching", nodes=9).neighbors(u, 0) for u in range(9)) == 1


def test_the_cache_of_rounds_is_bounded_and_rounds_are_drawn_again_alike() -> None:
    graph = make("random_regular", nodes=16, degree=4)
    early = graph.lists(3)
    for r in range(1000, 1300):
        graph.lists(r)
    assert len(graph._out) <= 64 and graph.lists(3) == early


def test_a_view_may_have_the_edges_of_an_earlier_round_of_the_graph() -> None:
    """Rounds of training without an exchange do not advance the graph."""
    graph = make("one_peer_exponential", nodes=8)
    of_round_1, plain = view(graph, 0, 5, at=1), view(graph, 0, 5)
    assert of_round_1.round == plain.round == 5
    assert of_round_1.neighbors == graph.neighbors(0, 1) != graph.neighbors(0, 5) == plain.neighbors
    assert of_round_1.weights == graph.weights(0, 1) and plain.weights == graph.weights(0, 5)
