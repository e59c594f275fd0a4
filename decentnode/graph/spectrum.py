"""Measures how fast a graph mixes: spectral gap, rounds to consensus, diameter."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from decentnode.graph.base import Entries, Graph
from decentnode.graph.topology import Lists

SAMPLED_ROUNDS = 32
SPECTRAL_NODES = 256
"""Larger graphs are measured by the effect of their matrices on vectors: a spectrum takes n^3 operations."""
COLUMNS = 8
MAX_DRAWN_ROUNDS = 500
"""Number of rounds of a graph without a period that are tried; later ones are extrapolated."""
MAX_DOUBLINGS = 40
"""A graph that has not reached consensus after 2^40 periods never does."""
MAX_BASIS, MAX_BASIS_ENTRIES = 512, 4_000_000
"""Number of vectors, and of their entries, with which the slowest mode of a large graph is searched. On a ring of n
nodes it takes n / 2 vectors."""
CONVERGED = 0.05
"""Greatest error of a spectral gap, relative to it, with which the search ends."""
CONSENSUS = 1e-3
"""Consensus is reached when the distance to the mean has shrunk to this fraction."""
EXACT = 1e-12
"""A relative distance below this counts as exact averaging."""


def deviations(x: np.ndarray) -> np.ndarray:
    """Returns each row's difference from the mean of all rows: x - J x. If W keeps the mean, (I - J) W = W - J."""
    found: np.ndarray = x - x.mean(axis=0)
    return found


def contraction(graph: Graph) -> float:
    """Returns the rate of `mixing`; nan if it is not known."""
    rate = mixing(graph)[0]
    return math.nan if rate is None else rate


def mixing(graph: Graph, target: float = CONSENSUS) -> tuple[float | None, int | None]:
    """Returns (the factor per round by which the distance to the mean shrinks in the long run: 0 if a period averages
    exactly, 1 if nodes never reach consensus, None if the graph is too large to find it; the number of rounds after
    which every distance to the mean has shrunk to `target` of what it was, None if it never does or is not known).

    The distances of a graph of more than SPECTRAL_NODES nodes without a period are those of a few random vectors.
    """
    if graph.num_nodes == 1:
        return 0.0, 0
    if graph.period is None:
        return _measure_drawn_graph(graph, max(target, EXACT))
    measure = _measure_product if graph.num_nodes <= SPECTRAL_NODES else _measure_slowest_mode
    return measure(graph, max(target, EXACT))


def _norm(deviation: np.ndarray) -> float:
    return float(np.linalg.norm(deviation, 2))


def _measure_product(graph: Graph, target: float) -> tuple[float, int | None]:
    """Returns what `mixing` does, for a graph with a period, from powers of the product D of a period's matrices: D,
    D^2, D^4 and so on."""
    assert graph.period is not None
    product = np.eye(graph.num_nodes)
    for round in range(graph.period):
        product = graph.matrix(round) @ product
    powers = [deviations(product)]
    norms = [_norm(powers[0])]
    while norms[-1] > min(target, CONSENSUS) and len(powers) <= MAX_DOUBLINGS:
        powers.append(powers[-1] @ powers[-1])
        norms.append(_norm(powers[-1]))
    if norms[-1] > target:
        return 1.0, None
    at = next(index for index, norm in enumerate(norms) if norm <= CONSENSUS)
    rate = 0.0 if norms[at] < EXACT else norms[at] ** (1.0 / (2**at * graph.period))
    product, rounds = np.eye(graph.num_nodes), 0
    for index in reversed(range(len(powers))):
        if _norm(longer := powers[index] @ product) > target:
            product, rounds = longer, rounds + 2**index * graph.period
    for round in range(graph.period):
        product = graph.matrix(round) @ product
        if _norm(deviations(product)) <= target:
            return rate, rounds + round + 1
    raise AssertionError("the product of one more period is below the target")


def _measure_drawn_graph(graph: Graph, target: float) -> tuple[float, int | None]:
    """Returns what `mixing` does, for a graph that is drawn anew in each round."""
    n = graph.num_nodes
    whole = n <= SPECTRAL_NODES
    x = deviations(np.eye(n)) if whole else _random_vectors(graph)
    first = 1.0 if whole else float(np.linalg.norm(x))
    limit, distance, rounds = first * (math.sqrt(n) if whole else 1.0), first, 0
    while rounds < MAX_DRAWN_ROUNDS and distance > target * first:
        x, rounds = deviations(graph.entries(rounds).mixed(x)), rounds + 1
        distance = float(np.linalg.norm(x))
        if whole and (distance <= target * limit or rounds == MAX_DRAWN_ROUNDS):
            distance = _norm(x)  # at most sqrt(n) times smaller than the norm above, and takes longer
    left = distance / first
    if left >= 1 - 1e-9:
        return 1.0, None
    rate = 0.0 if left < EXACT else left ** (1 / rounds)
    return rate, rounds if left <= target else math.ceil(math.log(target) / math.log(rate))


def _measure_slowest_mode(graph: Graph, target: float) -> tuple[float | None, int | None]:
    """Returns what `mixing` does, for a large graph with a period."""
    assert graph.period is not None
    entries = [graph.entries(round) for round in range(graph.period)]
    largest = _largest_eigenvalue(entries, graph.num_nodes)
    if largest is None:
        return None, None
    if largest >= 1 - EXACT:
        return 1.0, None
    if largest >= EXACT:
        rate = largest ** (1.0 / graph.period)
        return rate, max(1, math.ceil(math.log(target) / math.log(rate) - 1e-9))
    x = _random_vectors(graph)
    first = np.linalg.norm(x)
    for rounds, each in enumerate(entries, 1):
        x = each.mixed(x)
        if np.linalg.norm(deviations(x)) <= target * first:
            return 0.0, rounds
    return 0.0, graph.period


def _largest_eigenvalue(entries: Sequence[Entries], n: int) -> float | None:
    """Returns the largest absolute eigenvalue, except that of the mean, of the product of sparse matrices (Arnoldi's
    method); None if it is not found with MAX_BASIS vectors."""
    most = max(1, min(n - 1, MAX_BASIS, MAX_BASIS_ENTRIES // n))
    basis, projected = np.zeros((most + 1, n)), np.zeros((most + 1, most))
    x = deviations(np.random.default_rng(0).standard_normal(n))
    basis[0] = x / np.linalg.norm(x)
    check = 16
    for size in range(1, most + 1):
        x = basis[size - 1]
        for each in entries:
            x = each.mixed(x[:, None])[:, 0]
        x = deviations(x)
        for _ in range(2):  # twice: once leaves rounding errors along the other vectors
            along = basis[:size] @ x
            x = x - along @ basis[:size]
            projected[:size, size - 1] += along
        rest = projected[size, size - 1] = float(np.linalg.norm(x))
        if rest > EXACT:
            basis[size] = x / rest
        if size in (check, most) or rest <= EXACT:
            check = 2 * size
            values, vectors = np.linalg.eig(projected[:size, :size])
            at = int(np.abs(values).argmax())
            found = float(np.abs(values[at]))
            if rest <= EXACT or size == n - 1 or rest * abs(vectors[-1, at]) <= CONVERGED * (1 - found):
                return found
    return None


def keeps_mean(graph: Graph) -> bool:
    """Returns whether mixing preserves the mean of all models, in the rounds of a period, of which at most the first
    SAMPLED_ROUNDS are checked."""
    n = graph.num_nodes
    for round in range(min(graph.period or SAMPLED_ROUNDS, SAMPLED_ROUNDS)):
        found = graph.entries(round)
        if abs(np.bincount(found.sources, found.weights, n) - 1).max() > 1e-9:
            return False
    return True


def averages_exactly(graph: Graph) -> bool:
    """Returns whether a period of the graph takes every node to the mean of all models."""
    if graph.period is None:
        return False
    x = _random_vectors(graph)
    first = np.linalg.norm(x)
    for round in range(graph.period):
        x = graph.entries(round).mixed(x)
    return bool(np.linalg.norm(x) <= EXACT * first)


def _random_vectors(graph: Graph) -> np.ndarray:
    return deviations(np.random.default_rng(0).standard_normal((graph.num_nodes, COLUMNS)))


def diameter(lists: Lists) -> int | None:
    """Returns the largest number of hops between two nodes; None if the graph is not connected."""
    longest = 0
    for start in range(len(lists)):
        hops = {start: 0}
        queue = deque([start])
        while queue:
            i = queue.popleft()
            for j in lists[i]:
                if j not in hops:
                    hops[j] = hops[i] + 1
                    queue.append(j)
        if len(hops) < len(lists):
            return None
        longest = max(longest, max(hops.values()))
    return longest
