"""EquiTopo: matrices by the paper's formulas, and rates that do not grow with the number of nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from decentnode.errors import GraphError
from decentnode.graph.equitopo import RATE, EquiDyn, EquiStatic, best_offsets
from decentnode.graph.spectrum import contraction, mixing
from tests.graph.contract import make

NODES = (2, 3, 16, 17, 64, 1024)


def distance(matrix: np.ndarray) -> float:
    """Returns ||W - J||_2."""
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


def basis(n: int, offset: int) -> np.ndarray:
    """Returns A^(u): a node gives (n - 1) / n to the node u places before it, and 1 / n to itself."""
    return np.eye(n) / n + (n - 1) / n * np.roll(np.eye(n), offset, axis=0)


def matching(n: int, offset: int, start: int) -> np.ndarray:
    """Returns the permutation of OU-EquiDyn: i and i + u are exchanged if neither is yet."""
    found = np.eye(n)
    for i in [*range(start, n), *range(start)]:
        j = (i + offset) % n
        if found[i, i] == found[j, j] == 1:
            found[[i, j]] = found[[j, i]]
    return found


def static(name: str, **options: object) -> EquiStatic:
    made = make(name, **options)
    assert isinstance(made, EquiStatic)
    return made


def dynamic(name: str, **options: object) -> EquiDyn:
    made = make(name, **options)
    assert isinstance(made, EquiDyn)
    return made


@pytest.mark.parametrize("n", range(2, 20))
def test_matrices_are_those_of_the_paper(n: int) -> None:
    eta = n / 2 / (n - 1)
    for degree in range(1, n):
        directed = static("d_equistatic", nodes=n, degree=degree)
        assert len(set(directed.offsets)) == degree
        expected = np.mean([basis(n, u) for u in directed.offsets], axis=0)
        np.testing.assert_allclose(directed.matrix(0), expected, atol=1e-15)
        if (degree == 1 and n > 2) or degree * n % 2:
            continue
        undirected = static("u_equistatic", nodes=n, degree=degree)
        assert len(set(undirected.offsets)) == degree
        expected = np.mean([basis(n, u) + basis(n, u).T for u in undirected.offsets], axis=0) / 2
        np.testing.assert_allclose(undirected.matrix(0), expected, atol=1e-15)
    for count, r in itertools.product((None, 1, n - 1), range(4)):
        of_one, pairs = dynamic("od_equidyn", nodes=n, offsets=count), dynamic("ou_equidyn", nodes=n, offsets=count)
        offset, start = pairs._draw(r)
        assert (offset, start) == of_one._draw(r) and offset in of_one.offsets
        np.testing.assert_allclose(of_one.matrix(r), (1 - eta) * np.eye(n) + eta * basis(n, offset), atol=1e-15)
        step = np.eye(n) / n + (n - 1) / n * matching(n, offset, start)
        np.testing.assert_allclose(pairs.matrix(r), (1 - eta) * np.eye(n) + eta * step, atol=1e-15)


@pytest.mark.parametrize("name", ["d_equistatic", "u_equistatic"])
def test_the_rate_of_a_static_graph_is_kept_at_every_number_of_nodes_by_a_degree_of_the_order_of_log_n(
    name: str,
) -> None:
    for n in NODES:
        graph = static(name, nodes=n)
        rate = distance(graph.matrix(0))
        # larger graphs are measured on random vectors
        assert rate <= RATE + 1e-6 and rate == pytest.approx(contraction(graph), abs=1e-6 if n <= 256 else 0.05)
        assert len(graph.offsets) <= 6 * math.log(n) and len(graph.neighbors(0, 0)) == len(graph.offsets)
        assert mixing(graph)[1] in range(1, 11)
    assert distance(static(name, nodes=64, rate=0.2).matrix(0)) <= 0.2 + 1e-6
    degrees = [len(static(name, nodes=64, rate=rate).offsets) for rate in (0.8, 0.5, 0.2)]
    assert degrees == sorted(set(degrees))


@pytest.mark.parametrize(("name", "n"), [("d_equistatic", 1000), ("u_equistatic", 52), ("u_equistatic", 64)])
def test_no_smaller_degree_reaches_the_rate(name: str, n: int) -> None:
    """Also where a larger one than the smallest does not reach it, which a bisection would miss."""
    degree = len(static(name, nodes=n).offsets)
    for smaller in range(2, degree, 1 if name == "d_equistatic" else 1 + n % 2):
        assert best_offsets(n, smaller, name == "u_equistatic", 1)[0] > RATE


def test_a_given_degree_has_the_same_edges_as_one_that_was_found() -> None:
    for name in ("d_equistatic", "u_equistatic"):
        found = static(name, nodes=64)
        assert static(name, nodes=64, degree=len(found.offsets)).offsets == found.offsets


@pytest.mark.parametrize(("name", "degree"), [("d_equistatic", 1), ("u_equistatic", 2)])
def test_graphs_of_the_lowest_degree_are_connected_also_where_their_rate_is_nearly_one(name: str, degree: int) -> None:
    for n in (60, 4096):
        assert math.gcd(n, *static(name, nodes=n, degree=degree).offsets) == 1


def test_most_random_sets_of_the_size_in_the_papers_theorem_have_the_rate() -> None:
    """With M = 8 ln(2 n / p) / (3 rho^2) offsets the rate is at most rho with probability 1 - p."""
    n, rho, p = 1024, 0.5, 0.1
    count = math.ceil(8 * math.log(2 * n / p) / (3 * rho**2))
    worse = 0
    for seed in range(100):
        offsets = np.random.default_rng(seed).integers(1, n, count)
        row = np.bincount(offsets, minlength=n) * (n - 1) / n / count
        row[0] += 1 / n
        worse += np.abs(np.fft.fft(row))[1:].max() > rho
    assert worse <= 100 * p
    assert len(static("d_equistatic", nodes=n).offsets) < count / 4, "the best of some sets needs far fewer"


def expected_rate(name: str, n: int, offsets: Sequence[int]) -> float:
    """Returns the factor of the expected squared distance per round: ||E[W^T W] - J||."""
    eye, eta = np.eye(n), n / 2 / (n - 1)
    if name == "od_equidyn":
        steps = [basis(n, u) for u in offsets]
    else:
        steps = [eye / n + (n - 1) / n * matching(n, u, s) for u in offsets for s in range(n)]
    each = [(1 - eta) * eye + eta * step for step in steps]
    return distance(np.mean([w.T @ w for w in each], axis=0))


@pytest.mark.parametrize("n", [3, 8, 16, 17, 24])
def test_the_expected_rate_of_a_round_is_below_the_papers_bounds(n: int) -> None:
    """1 - 2 eta (1 - eta) (1 - rho) and 1 - 4/3 eta (1 - eta) (1 - rho) at their best eta, 1/2; with all offsets rho is
    zero (docs/explanation/graphs.rst, "Rates")."""
    assert expected_rate("od_equidyn", n, range(1, n)) == pytest.approx(0.5 * (1 - 1 / (n - 1)))
    assert expected_rate("ou_equidyn", n, range(1, n)) < 2 / 3
    for count in range(1, n - 1, 3):
        rho, offsets = best_offsets(n, count, False, 1)
        assert expected_rate("od_equidyn", n, offsets) <= (1 + rho) / 2
        assert expected_rate("ou_equidyn", n, offsets) <= (2 + rho) / 3


@pytest.mark.parametrize("name", ["od_equidyn", "ou_equidyn"])
@pytest.mark.parametrize("offsets", [None, 12])
def test_the_rate_of_one_peer_graphs_does_not_grow_with_the_number_of_nodes(name: str, offsets: int | None) -> None:
    for n in (16, 17, 128, 1024):
        graph = make(name, nodes=n, offsets=offsets)
        x = np.random.default_rng(0).standard_normal((n, 16))
        x -= x.mean(0)
        factors = [np.square(graph.entries(r).mixed(x)).sum() / np.square(x).sum() for r in range(40)]
        basis_rate = 0.0 if offsets is None or offsets >= n - 1 else best_offsets(n, offsets, False, 1)[0]
        bound = 1 - (1 / 2 if name == "od_equidyn" else 1 / 3) * (1 - basis_rate)
        assert np.mean(factors) < bound + 0.03
        assert (mixing(graph)[1] or math.inf) < 60


@pytest.mark.parametrize("name", ["od_equidyn", "ou_equidyn"])
def test_a_node_has_one_peer_per_round_and_few_in_all_if_there_are_few_offsets(name: str) -> None:
    graph = make(name, nodes=50, offsets=3)
    partners = {uid: {*itertools.chain(*((*graph.neighbors(uid, r), *graph.sources(uid, r)) for r in range(60)))}
                for uid in range(50)}  # fmt: skip
    assert max(map(len, partners.values())) <= 6 and min(map(len, partners.values())) > 1
    per_round = [sum(len(graph.neighbors(uid, r)) for uid in range(50)) for r in range(60)]
    assert max(per_round) == 50 and min(per_round) >= (50 if name == "od_equidyn" else 2 / 3 * 50 - 1)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("d_equistatic", {"nodes": 8, "degree": 8}, "try degree 7"),
    ("u_equistatic", {"nodes": 9, "degree": 3}, "try degree 2"),
    ("u_equistatic", {"nodes": 8, "degree": 1}, "try degree 2"),
    ("u_equistatic", {"nodes": 8, "degree": 4, "rate": 0.5}, "degree or rate, not both"),
    ("od_equidyn", {"nodes": 8, "offsets": 8}, "offsets must be at most 7"),
    ("ou_equidyn", {"nodes": 8, "offsets": 9}, "offsets must be at most 7"),
])  # fmt: skip
def test_impossible_options_are_refused_with_advice(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make(name, **options)
