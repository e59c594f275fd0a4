"""MATCHA's matchings, probabilities and weight alpha, compared with brute force and random search."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from decentnode.errors import GraphError
from decentnode.graph import optima
from decentnode.graph.matcha import Matcha, best_alpha, connectivity, laplacian, matchings_of, probabilities_of
from decentnode.graph.topology import adjacency
from tests.graph.contract import make

BASES: dict[str, tuple[str, dict[str, object]]] = {
    "odd ring": ("ring", {"nodes": 7}), "torus": ("torus", {"nodes": 12}), "complete": ("complete", {"nodes": 7}),
    "line": ("line", {"nodes": 5}), "tree": ("tree", {"nodes": 10}), "random": ("erdos_renyi", {"nodes": 14}),
    "regular": ("regular", {"nodes": 16, "degree": 5}), "star": ("star", {"nodes": 6}),
}  # fmt: skip


def matchings_and_laplacians(base: str) -> tuple[list[list[tuple[int, int]]], np.ndarray]:
    name, options = BASES[base]
    graph = make(name, **options)
    matchings = matchings_of(graph.lists(0))
    return matchings, np.array([laplacian(graph.num_nodes, matching) for matching in matchings])


def matcha(**options: object) -> Matcha:
    made = make("matcha", **options)
    assert isinstance(made, Matcha)
    return made


def check_matchings(lists: list[tuple[int, ...]]) -> None:
    """Checks that matchings have every edge once, no node twice, and are at most the greatest degree plus one."""
    matchings = matchings_of(lists)
    edges = sorted(edge for matching in matchings for edge in matching)
    assert edges == [(i, j) for i, others in enumerate(lists) for j in others if i < j]
    for matching in matchings:
        assert len({uid for edge in matching for uid in edge}) == 2 * len(matching)
    assert len(matchings) <= max(map(len, lists)) + 1


@pytest.mark.parametrize("base", BASES)
def test_matchings_partition_the_edges_of_base_graphs(base: str) -> None:
    name, options = BASES[base]
    check_matchings(list(make(name, **options).lists(0)))


def test_matchings_partition_the_edges_of_random_graphs() -> None:
    draws = np.random.default_rng(0)
    for _ in range(300):
        n = int(draws.integers(2, 14))
        pairs = list(itertools.combinations(range(n), 2))
        order = draws.permutation(n)
        edges = [(int(order[i]), int(order[j])) for i, j in pairs if draws.random() < draws.random()]
        check_matchings(list(adjacency(n, edges)))


@pytest.mark.parametrize("budget", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("base", BASES)
def test_no_other_probabilities_give_much_better_connectivity(base: str, budget: float) -> None:
    """Compares with equal probabilities and with random ones, near and far."""
    _, laplacians = matchings_and_laplacians(base)
    count, draws = len(laplacians), np.random.default_rng(1)
    p = probabilities_of(laplacians, budget)
    assert p.mean() == pytest.approx(budget, abs=1e-6) and (p >= 0).all() and (p <= 1).all()
    best = connectivity(laplacians, p)
    assert best >= connectivity(laplacians, np.full(count, budget)) - 1e-5
    for width in (1.0, 0.3, 0.1, 0.03):
        for _ in range(100):
            near = p + width * draws.normal(size=count)
            near = np.clip(near - near.mean() + budget, 0, 1)
            near *= min(1.0, budget / max(near.mean(), 1e-9))
            assert connectivity(laplacians, near) <= 1.01 * best + 1e-9


def test_a_bridge_is_active_more_often_than_redundant_edges() -> None:
    """The paper's example: two cliques and one edge between them."""
    clique = list(itertools.combinations(range(5), 2))
    lists = adjacency(10, [*clique, *((a + 5, b + 5) for a, b in clique), (0, 5)])
    matchings = matchings_of(lists)
    p = probabilities_of(np.array([laplacian(10, matching) for matching in matchings]), 0.5)
    bridge = next(k for k, matching in enumerate(matchings) if (0, 5) in matching)
    assert p[bridge] > 0.99 and p[bridge] == p.max()


@pytest.mark.parametrize("base", BASES)
def test_the_expected_contraction_equals_the_sum_over_all_sets_of_matchings(base: str) -> None:
    """Compares the formula of E[W^2] with the sum over all 2^M sets, and alpha with a grid."""
    _, laplacians = matchings_and_laplacians(base)
    n, count = laplacians.shape[1], len(laplacians)
    p = probabilities_of(laplacians, 0.5)
    alpha, contraction = best_alpha(laplacians, p)

    def norm(alpha: float) -> float:
        total = np.zeros((n, n))
        for active in itertools.product((0, 1), repeat=count):
            w = np.eye(n) - alpha * np.tensordot(np.array(active), laplacians, 1)
            total += np.where(active, p, 1 - p).prod() * w @ w
        return float(np.linalg.norm(total - 1 / n, 2))

    assert contraction == pytest.approx(norm(alpha), abs=1e-9)
    largest = 1 / laplacians.sum(0).diagonal().max()
    assert all(contraction <= norm(other) + 1e-5 for other in np.linspace(0, largest, 9))


def test_matchings_are_active_with_their_probabilities() -> None:
    graph = matcha(nodes=10, base={"name": "tree", "nodes": 10}, budget=0.6)
    counts = np.zeros(len(graph.matchings))
    for r in range(3000):
        lists = graph.lists(r)
        counts += [matching[0][1] in lists[matching[0][0]] for matching in graph.matchings]
        for matching in graph.matchings:
            assert len({j in lists[i] for i, j in matching}) == 1, "a matching is active as a whole or not at all"
    np.testing.assert_allclose(counts / 3000, graph.probabilities, atol=0.03)


def test_models_approach_consensus_at_the_expected_rate() -> None:
    graph = matcha(nodes=12, base={"name": "torus", "nodes": 12}, budget=0.5)
    x = np.random.default_rng(0).normal(size=(12, 400))
    x -= x.mean(0)
    before = (x**2).sum()
    for r in range(60):
        x = graph.matrix(r) @ x
    assert 0 < (x**2).sum() <= before * graph.expected**60 * 5


def test_a_budget_of_one_gives_the_base_graph() -> None:
    graph, base = matcha(nodes=9, base={"name": "torus", "nodes": 9}, budget=1), make("torus", nodes=9)
    assert graph.period == 1 and graph.lists(5) == list(base.lists(0))


def test_another_seed_activates_the_same_matchings_in_other_rounds() -> None:
    options: dict[str, object] = {"nodes": 8, "base": {"name": "ring", "nodes": 8}}
    one, other = matcha(**options), matcha(**options, seed=5)
    assert one.matchings == other.matchings and any(one.lists(r) != other.lists(r) for r in range(5))


@pytest.mark.parametrize(("options", "message"), [
    ({"nodes": 8, "base": {"name": "ring", "nodes": 9}}, "base must have 8 nodes, got 9"),
    ({"nodes": 300, "base": {"name": "ring", "nodes": 300}}, "128 nodes at most, got 300"),
    ({"nodes": 8, "base": {"name": "exponential", "nodes": 8}}, "must be an undirected, connected graph"),
])  # fmt: skip
def test_base_graphs_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make("matcha", **options)


def test_a_graph_is_optimized_once_per_process_and_not_where_the_result_was_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[float] = []

    def counted(laplacians: np.ndarray, budget: float) -> np.ndarray:
        calls.append(budget)
        return probabilities_of(laplacians, budget)

    monkeypatch.setattr("decentnode.graph.matcha.probabilities_of", counted)
    monkeypatch.setattr(optima, "_known", {})
    options: dict[str, object] = {"nodes": 12, "base": {"name": "torus", "nodes": 12}}
    made = [matcha(budget=budget, **options) for budget in (0.5, 0.25, 0.5)]
    assert calls == [0.5, 0.25] and made[0].expected == made[2].expected != made[1].expected
    handed = json.loads(json.dumps(optima.known_optima()))
    monkeypatch.setattr(optima, "_known", {})
    optima.take_optima(handed)
    again = matcha(budget=0.5, **options)
    assert calls == [0.5, 0.25] and again.alpha == made[0].alpha and again.expected == made[0].expected
    assert np.array_equal(again.probabilities, made[0].probabilities)
