"""Graphs of epidemic learning: their random draws, how fast they bring models together, and the cost of a view."""

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
from decentnode.graph.spectrum import contraction, deviations, keeps_mean, mixing
from tests.graph.contract import make

NAMES = ["el_local", "random_regular"]


@pytest.mark.parametrize("size", [*range(1, 40), 256, 257, 1000])
def test_random_permutations_are_bijections_with_an_inverse(size: int) -> None:
    permutation = RandomPermutation(size, rng.stream(1, rng.GLOBAL, "test", size))
    values = np.arange(size)
    permuted = permutation(values)
    assert sorted(permuted.tolist()) == values.tolist()
    np.testing.assert_array_equal(permutation.inverse(permuted), values)


@pytest.mark.slow
def test_all_permutations_of_four_values_are_equally_likely() -> None:
    """In 6,000 draws each of the 24 comes 250 times, within 4.5 standard deviations of 15.5."""
    counts = Counter(tuple(RandomPermutation(4, rng.stream(1, rng.GLOBAL, "test", r))(np.arange(4)).tolist())
                     for r in range(6000))  # fmt: skip
    assert len(counts) == 24 and all(abs(count - 250) < 70 for count in counts.values())


def test_the_random_words_of_a_node_do_not_depend_on_the_other_nodes_of_the_call() -> None:
    for count in (1, 4, 7):
        words = rng.words(3, "test", 5, range(20), count)
        assert words.shape == (20, count) and len(np.unique(words)) == 20 * count
        np.testing.assert_array_equal(rng.words(3, "test", 5, range(7, 9), count), words[7:9])
    assert not np.array_equal(rng.words(3, "test", 6, range(20), 4), rng.words(3, "test", 5, range(20), 4))


@pytest.mark.parametrize("name", NAMES)
def test_neighbors_of_one_node_are_the_same_drawn_alone_or_with_all_nodes(name: str) -> None:
    neighbors = make(name, nodes=1000, degree=6).lists(3)
    sources = make(name, nodes=1000, degree=6).in_lists(3)
    for uid in (0, 1, 500, 999):
        assert make(name, nodes=1000, degree=6).neighbors(uid, 3) == neighbors[uid]
        assert make(name, nodes=1000, degree=6).sources(uid, 3) == sources[uid]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_sets_of_neighbors_are_equally_likely(name: str) -> None:
    """In 4,200 rounds each of the 21 pairs of 7 others comes 200 times, within 5 standard deviations of 13.8."""
    graph = make(name, nodes=8, degree=2)
    counts = Counter(graph.neighbors(3, r) for r in range(4200))
    assert set(counts) == set(itertools.combinations((0, 1, 2, 4, 5, 6, 7), 2))
    assert all(abs(count - 200) < 70 for count in counts.values())


def test_the_number_of_sources_of_a_node_is_binomial() -> None:
    """Each of the 499 other nodes sends to it with probability 6 / 499."""
    graph = make("el_local", nodes=500, degree=6)
    sources = np.array([len(graph.sources(uid, r)) for r in range(4) for uid in range(500)])
    assert sources.mean() == 6 and sources.var() == pytest.approx(6 * (1 - 6 / 499), rel=0.1)
    assert all(len(graph.neighbors(uid, 0)) == 6 for uid in range(500))


def _mean_contraction(graph: Any, rounds: int) -> float:
    """Returns the mean over rounds of |W x|^2 / |x|^2, where x are random deviations from the mean."""
    x = deviations(np.random.default_rng(1).standard_normal((graph.num_nodes, 6)))
    return float(np.mean([(deviations(graph.matrix(r) @ x) ** 2).sum() / (x**2).sum() for r in range(rounds)]))


@pytest.mark.sampled(one=["degree"])
@pytest.mark.parametrize("degree", [2, 4, 7])
def test_distances_to_the_mean_shrink_as_the_paper_says(degree: int) -> None:
    """De Vos et al. 2023, lemma 1, for 16 nodes."""
    n, s = 16, degree
    oracle, local = ((s + 1) ** -1 * (1 - s / (n - 1)), (1 - (1 - s / (n - 1)) ** n) / s - 1 / (n - 1))
    assert _mean_contraction(make("random_regular", nodes=n, degree=s), 300) == pytest.approx(oracle, rel=0.04)
    assert _mean_contraction(make("el_local", nodes=n, degree=s), 300) == pytest.approx(local, rel=0.04)


@pytest.mark.slow
def test_el_local_keeps_the_mean_only_in_expectation() -> None:
    graph = make("el_local", nodes=12, degree=3)
    assert not keeps_mean(graph) and keeps_mean(make("random_regular", nodes=12, degree=3))
    columns = np.mean([graph.matrix(r).sum(axis=0) for r in range(1500)], axis=0)
    np.testing.assert_allclose(columns, 1, atol=0.04)


@pytest.mark.parametrize("nodes", [12, 300])
def test_contraction_measures_distances_between_the_nodes(nodes: int) -> None:
    """Nodes of EL-Local agree, but not on the initial mean: the distance to that mean would not shrink to zero."""
    local, oracle = (make(name, nodes=nodes, degree=4) for name in NAMES)
    assert 0 < contraction(oracle) < contraction(local) < 0.6
    assert mixing(oracle)[1] <= mixing(local)[1] < 20


@pytest.mark.parametrize("name", NAMES)
def test_a_view_of_one_node_does_not_draw_all_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make(name, nodes=1 << 20, degree=4)
    monkeypatch.setattr(type(graph), "_draw_table", lambda *_: pytest.fail("all nodes were drawn"))
    for uid in (0, 77, (1 << 20) - 1):
        assert len(graph.neighbors(uid, 3)) == 4
    if name == "random_regular":
        of_5 = view(graph, 5, 3)
        assert of_5.sources == of_5.neighbors and abs(sum(of_5.weights.values()) - 1) < 1e-12
        assert all(5 in graph.neighbors(j, 3) for j in of_5.neighbors)


@pytest.mark.parametrize("name", NAMES)
def test_after_a_few_nodes_of_a_round_all_are_drawn_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, drawn_alone = make(name, nodes=1000, degree=4), []
    draw = type(graph)._draw_neighbors
    monkeypatch.setattr(type(graph), "_draw_neighbors",
                        lambda self, uid, r: drawn_alone.append(uid) or draw(self, uid, r))  # fmt: skip
    lists = [graph.neighbors(uid, 5) for uid in range(1000)]
    assert len(drawn_alone) < 8 and lists == graph.lists(5)


def test_a_degree_of_the_number_of_nodes_is_refused() -> None:
    with pytest.raises(GraphError, match="el_local: degree must be below 4"):
        make("el_local", nodes=4, degree=4)


@pytest.mark.parametrize(("name", "weights"), [
    ("el_local", None), ("el_local", "uniform"), ("random_regular", None), ("random_regular", "uniform"),
    ("random_regular", "metropolis_hastings"), ("random_regular", "laplacian"),
])  # fmt: skip
@pytest.mark.parametrize("lazy", [False, True])
def test_the_tables_of_a_round_have_the_weights_and_neighbors_of_all_nodes(
    name: str, weights: str | None, lazy: bool
) -> None:
    kind = None if weights is None else load_class(weights, WEIGHTS, "weights")
    given = None if kind is None else kind(kind.Config.model_validate({"name": weights, "lazy": lazy}))
    graph = make(name, nodes=30, degree=5, weights=given)
    for round in (0, 7):
        at_once, node_by_node = graph.entries(round), Graph.entries(graph, round)
        for column, expected in zip(at_once, node_by_node, strict=True):
            np.testing.assert_array_equal(column, expected)
        table = graph.targets_table(round)
        assert table is not None and [tuple(row) for row in table.tolist()] == [
            graph.neighbors(uid, round) for uid in range(30)]  # fmt: skip
