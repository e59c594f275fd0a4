"""Epidemic learning: what is drawn, what it does to the distance between models, and what a view of it costs."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from decentnode import rng
from decentnode.config.component import load_class
from decentnode.errors import GraphError
from decentnode.graph import WEIGHTS
from decentnode.graph.base import Graph, view
from decentnode.graph.permutation import RandomPermutation
from decentnode.graph.spectrum import contraction, deviations, keeps_mean, rounds_to_consensus
from tests.graph.contract import make

NAMES = ["el_local", "random_regular"]


@pytest.mark.parametrize("size", [*range(1, 40), 256, 257, 1000])
def test_permutations_take_every_value_to_another_and_back(size: int) -> None:
    permutation = RandomPermutation(size, rng.stream(1, rng.GLOBAL, "test", size))
    every = np.arange(size)
    there = permutation(every)
    assert sorted(there.tolist()) == every.tolist()
    np.testing.assert_array_equal(permutation.inverse(there), every)


@pytest.mark.slow
def test_small_permutations_are_all_as_likely() -> None:
    """Of the 24 of four values each comes 250 times in 6,000, give or take 4.5 deviations of 15.5."""
    found = Counter(tuple(RandomPermutation(4, rng.stream(1, rng.GLOBAL, "test", r))(np.arange(4)).tolist())
                    for r in range(6000))  # fmt: skip
    assert len(found) == 24 and all(abs(count - 250) < 70 for count in found.values())


def test_words_of_a_node_are_the_same_whoever_else_is_asked_for() -> None:
    for count in (1, 4, 7):
        every = rng.words(3, "test", 5, range(20), count)
        assert every.shape == (20, count) and len(np.unique(every)) == 20 * count
        np.testing.assert_array_equal(rng.words(3, "test", 5, range(7, 9), count), every[7:9])
    assert not np.array_equal(rng.words(3, "test", 6, range(20), 4), rng.words(3, "test", 5, range(20), 4))


@pytest.mark.parametrize("name", NAMES)
def test_one_node_alone_draws_what_it_draws_among_all(name: str) -> None:
    table = make(name, nodes=1000, degree=6).lists(3)
    back = make(name, nodes=1000, degree=6).in_lists(3)
    for uid in (0, 1, 500, 999):
        assert make(name, nodes=1000, degree=6).neighbors(uid, 3) == table[uid]
        assert make(name, nodes=1000, degree=6).sources(uid, 3) == back[uid]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sets_of_neighbors_are_all_as_likely(name: str) -> None:
    """Of the 21 pairs of 7 others each comes 200 times in 4,200 rounds, give or take 5 deviations of 13.8."""
    graph = make(name, nodes=8, degree=2)
    found = Counter(graph.neighbors(3, r) for r in range(4200))
    assert set(found) == set(itertools.combinations((0, 1, 2, 4, 5, 6, 7), 2))
    assert all(abs(count - 200) < 70 for count in found.values())


def test_how_many_send_to_a_node_is_a_matter_of_chance() -> None:
    """Each of 499 others sends to it with probability 6 / 499."""
    graph = make("el_local", nodes=500, degree=6)
    sources = np.array([len(graph.sources(uid, r)) for r in range(4) for uid in range(500)])
    assert sources.mean() == 6 and sources.var() == pytest.approx(6 * (1 - 6 / 499), rel=0.1)
    assert all(len(graph.neighbors(uid, 0)) == 6 for uid in range(500))


def _contracted(graph: Any, rounds: int) -> float:
    """The mean over rounds of |W x|^2 / |x|^2, of distances to the mean."""
    x = deviations(np.random.default_rng(1).standard_normal((graph.num_nodes, 6)))
    return float(np.mean([(deviations(graph.matrix(r) @ x) ** 2).sum() / (x**2).sum() for r in range(rounds)]))


@pytest.mark.sampled(one=["degree"])
@pytest.mark.parametrize("degree", [2, 4, 7])
def test_distances_shrink_as_the_paper_says(degree: int) -> None:
    """De Vos et al. 2023, lemma 1, for 16 nodes."""
    n, s = 16, degree
    oracle, local = ((s + 1) ** -1 * (1 - s / (n - 1)), (1 - (1 - s / (n - 1)) ** n) / s - 1 / (n - 1))
    assert _contracted(make("random_regular", nodes=n, degree=s), 300) == pytest.approx(oracle, rel=0.04)
    assert _contracted(make("el_local", nodes=n, degree=s), 300) == pytest.approx(local, rel=0.04)


@pytest.mark.slow
def test_local_draws_keep_the_mean_in_expectation_alone() -> None:
    graph = make("el_local", nodes=12, degree=3)
    assert not keeps_mean(graph) and keeps_mean(make("random_regular", nodes=12, degree=3))
    columns = np.mean([graph.matrix(r).sum(axis=0) for r in range(1500)], axis=0)
    np.testing.assert_allclose(columns, 1, atol=0.04)


@pytest.mark.parametrize("nodes", [12, 300])
def test_rates_are_those_of_nodes_among_each_other(nodes: int) -> None:
    """Nodes of EL-Local agree, though not on the mean that they began with: that distance would never shrink."""
    local, oracle = (make(name, nodes=nodes, degree=4) for name in NAMES)
    assert 0 < contraction(oracle) < contraction(local) < 0.6
    assert rounds_to_consensus(oracle) <= rounds_to_consensus(local) < 20


@pytest.mark.parametrize("name", NAMES)
def test_a_view_of_one_node_makes_no_table_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make(name, nodes=1 << 20, degree=4)
    monkeypatch.setattr(type(graph), "_draw_table", lambda *_: pytest.fail("all nodes were drawn"))
    for uid in (0, 77, (1 << 20) - 1):
        assert len(graph.neighbors(uid, 3)) == 4
    if name == "random_regular":
        seen = view(graph, 5, 3)
        assert seen.sources == seen.neighbors and abs(sum(seen.weights.values()) - 1) < 1e-12
        assert all(5 in graph.neighbors(j, 3) for j in seen.neighbors)


@pytest.mark.parametrize("name", NAMES)
def test_many_nodes_of_a_round_are_drawn_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, single = make(name, nodes=1000, degree=4), []
    drawn = type(graph)._draw_neighbors
    monkeypatch.setattr(type(graph), "_draw_neighbors", lambda self, uid, r: single.append(uid) or drawn(self, uid, r))
    lists = [graph.neighbors(uid, 5) for uid in range(1000)]
    assert len(single) < 8 and lists == graph.lists(5)


def test_too_high_a_degree_is_refused() -> None:
    with pytest.raises(GraphError, match="el_local: degree must be below 4"):
        make("el_local", nodes=4, degree=4)


@pytest.mark.parametrize(("name", "weights"), [
    ("el_local", None), ("el_local", "uniform"), ("random_regular", None), ("random_regular", "uniform"),
    ("random_regular", "metropolis_hastings"), ("random_regular", "laplacian"),
])  # fmt: skip
@pytest.mark.parametrize("lazy", [False, True])
def test_the_table_of_a_round_has_the_rows_of_all_nodes(name: str, weights: str | None, lazy: bool) -> None:
    kind = None if weights is None else load_class(weights, WEIGHTS, "weights")
    given = None if kind is None else kind(kind.Config.model_validate({"name": weights, "lazy": lazy}))
    graph = make(name, nodes=30, degree=5, weights=given)
    for round in (0, 7):
        found, one_by_one = graph.entries(round), Graph.entries(graph, round)
        for mine, other in zip(found, one_by_one, strict=True):
            np.testing.assert_array_equal(mine, other)
        table = graph.targets_table(round)
        assert table is not None and [tuple(row) for row in table.tolist()] == [
            graph.neighbors(uid, round) for uid in range(30)]  # fmt: skip
