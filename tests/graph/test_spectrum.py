"""How fast graphs mix, compared with known eigenvalues and with the products of all matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decentnode.graph.spectrum import mixing
from tests.graph import contract

FAMILIES = [("ring", 9, {}), ("ring", 32, {}), ("torus", 12, {}), ("line", 10, {}), ("star", 7, {}),
            ("exponential", 12, {}), ("complete", 6, {}), ("hypercube", 16, {}), ("alternating_ring", 32, {}),
            ("one_peer_exponential", 16, {}), ("directed_one_peer_exponential", 12, {}), ("base_k_plus_1", 7, {}),
            ("alternating_exponential_ring", 16, {"nodes_per_machine": 2}), ("d_equistatic", 17, {}),
            ("random_matching", 9, {}), ("el_local", 12, {"degree": 3})]  # fmt: skip


@pytest.mark.parametrize(("name", "n", "keys"), FAMILIES)
@pytest.mark.parametrize("target", [0.3, 1e-3, 1e-7])
def test_rounds_to_consensus_are_the_first_after_which_every_distance_is_below_the_target(
    name: str, n: int, keys: dict[str, int], target: float
) -> None:
    graph = contract.make(name, nodes=n, **keys)
    rate, rounds = mixing(graph, target)
    assert rounds is not None and rate is not None and 0 <= rate < 1
    product = np.eye(n)
    for round in range(rounds):
        assert np.linalg.norm(product - product.mean(axis=0), 2) > target
        product = graph.matrix(round) @ product
    assert np.linalg.norm(product - product.mean(axis=0), 2) <= target * (1 + 1e-9)
    if graph.period is not None:
        assert rate == mixing(graph, 1e-2)[0], "the rate depends on the target"


@pytest.mark.parametrize("n", [256, 257, 1000])
def test_the_slowest_mode_of_a_large_ring_is_found(n: int) -> None:
    rate = (1 + 2 * math.cos(2 * math.pi / n)) / 3
    found, rounds = mixing(contract.make("ring", nodes=n))
    assert found is not None and 1 - found == pytest.approx(1 - rate, rel=0.05)
    assert rounds == pytest.approx(math.log(1e-3) / math.log(rate), rel=0.05)


@pytest.mark.parametrize("n", [254, 258])
def test_the_slowest_mode_of_a_sequence_of_graphs_is_found(n: int) -> None:
    found, rounds = mixing(contract.make("alternating_ring", nodes=n))
    rate = math.cos(2 * math.pi / n)
    assert found is not None and 1 - found == pytest.approx(1 - rate, rel=0.05)
    assert rounds == pytest.approx(math.log(1e-3) / math.log(rate), rel=0.05)


@pytest.mark.parametrize(("name", "n"), [("base_k_plus_1", 300), ("complete", 300), ("one_peer_exponential", 512)])
def test_exact_averages_of_large_graphs_are_found(name: str, n: int) -> None:
    graph = contract.make(name, nodes=n)
    rate, rounds = mixing(graph)
    assert rate == 0 and rounds is not None and graph.period is not None and rounds <= graph.period


def test_a_ring_that_is_too_large_has_no_known_rate() -> None:
    assert mixing(contract.make("ring", nodes=2000)) == (None, None)


def test_a_tree_with_uniform_weights_reaches_consensus() -> None:
    """Although one round may enlarge a distance: W does not keep the mean."""
    graph = contract.make("tree", nodes=16)
    rows = [graph.neighbors(uid, 0) for uid in range(16)]
    graph.weights = lambda uid, round, members=None: dict.fromkeys(sorted((uid, *rows[uid])), 1 / (len(rows[uid]) + 1))
    largest = sorted(abs(np.linalg.eigvals(graph.matrix(0))))[-2]
    rate, rounds = mixing(graph)
    assert rate == pytest.approx(largest, rel=0.01)
    assert rounds == pytest.approx(math.log(1e-3) / math.log(largest), rel=0.2)


@pytest.mark.parametrize("n", [8, 300])
def test_nodes_that_are_not_connected_never_reach_consensus(n: int) -> None:
    graph = contract.make("alternating_ring", nodes=n)
    graph.period, graph._out = 1, {}  # only its first round, again and again
    assert mixing(graph) == (1.0, None)
