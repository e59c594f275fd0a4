"""Gossip with an exact average of all models every few rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decentnode.errors import GraphError
from decentnode.graph.base import averaging_group_of
from decentnode.graph.weights import MetropolisHastings, MetropolisHastingsConfig
from tests.graph.contract import make


def test_all_rounds_but_the_last_of_every_period_are_those_of_the_base_graph() -> None:
    graph, ring = make("gossip_pga", nodes=8, every=4, base={"name": "ring", "nodes": 8}), make("ring", nodes=8)
    assert graph.period == 4
    for r in range(12):
        expected = np.full((8, 8), 1 / 8) if r % 4 == 3 else ring.matrix(0)
        np.testing.assert_allclose(graph.matrix(r), expected, atol=1e-15)
        assert averaging_group_of(graph, 0, r) == (tuple(range(8)) if r % 4 == 3 else ())


@pytest.mark.parametrize("base", [
    {"name": "alternating_ring"}, {"name": "one_peer_exponential"}, {"name": "random_matching"},
    {"name": "directed_one_peer_exponential"}, {"name": "el_local", "degree": 2},
])  # fmt: skip
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_averages_do_not_advance_a_base_graph_that_changes(base: dict[str, object], every: int) -> None:
    graph = make("gossip_pga", nodes=8, every=every, base={"nodes": 8, **base})
    alone = make(**{"nodes": 8, **base})  # type: ignore[arg-type]
    gossip = [r for r in range(40) if r % every != every - 1]
    for number, r in enumerate(gossip):
        assert np.array_equal(graph.matrix(r), alone.matrix(number))
    if alone.period is None:
        assert graph.period == (1 if every == 1 else None)
    else:
        assert graph.period == every * alone.period // math.gcd(alone.period, every - 1)


@pytest.mark.parametrize(("average", "n", "rounds"), [
    ({"name": "one_peer_exponential"}, 16, 4), ({"name": "base_k_plus_1", "peers": 2}, 9, 2),
    ({"name": "alternating_exponential_ring", "nodes_per_machine": 2}, 8, 4), ({"name": "base_k_plus_1"}, 7, 5),
])  # fmt: skip
def test_the_last_rounds_of_a_period_may_be_those_of_a_sparse_graph_and_give_the_exact_mean(
    average: dict[str, object], n: int, rounds: int
) -> None:
    every = rounds + 2
    graph = make("gossip_pga", nodes=n, every=every, base={"name": "ring", "nodes": n}, average={"nodes": n, **average})
    product = np.eye(n)
    for r in range(every - rounds, every):
        product = graph.matrix(r) @ product
    np.testing.assert_allclose(product, 1 / n, atol=1e-12)
    assert len(graph.neighbors(0, 0)) == 2 and np.array_equal(graph.matrix(1), make("ring", nodes=n).matrix(0))
    assert max(len(graph.neighbors(uid, r)) for uid in range(n) for r in range(2, every)) < n - 1


def test_the_weights_of_an_experiment_are_those_of_the_base_graph_and_the_average_stays_exact() -> None:
    lazy = MetropolisHastings(MetropolisHastingsConfig(lazy=True))
    base, average = {"name": "ring", "nodes": 6}, {"name": "base_k_plus_1", "nodes": 6}
    graph = make("gossip_pga", nodes=6, every=5, base=base, average=average, weights=lazy)
    assert graph.weights(0, 0) == pytest.approx({0: 2 / 3, 1: 1 / 6, 5: 1 / 6})
    product = np.linalg.multi_dot([graph.matrix(r) for r in range(4, 0, -1)])
    np.testing.assert_allclose(product, 1 / 6, atol=1e-12)


@pytest.mark.parametrize(("options", "message"), [
    ({"base": {"name": "ring", "nodes": 7}}, "base must have 8 nodes, got 7"),
    ({"average": {"name": "complete", "nodes": 4}}, "average must have 8 nodes, got 4"),
    ({"average": {"name": "one_peer_exponential", "nodes": 8}, "every": 2}, "every must be at least 3"),
    ({"average": {"name": "ring", "nodes": 8}}, "must be one of complete, one_peer_exponential"),
    ({"every": 0}, "every"),
])  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises((GraphError, ValueError), match=message):
        make("gossip_pga", **{"nodes": 8, "base": {"name": "ring", "nodes": 8}, **options})
