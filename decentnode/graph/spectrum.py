"""How fast a graph mixes."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from decentnode.graph.base import Entries, Graph
from decentnode.graph.topology import Lists

MAX_ROUNDS = 100_000
SAMPLED_ROUNDS = 32
SPECTRAL_NODES = 256
"""Larger graphs are judged by what their products do to random vectors: a spectrum takes n^3 steps."""
COLUMNS = 8
MOST_ROUNDS, MOST_DRAWN = 20_000, 500
"""Rounds of a large graph that are tried, of one with a period and of one without."""
POWER_ROUNDS = 200
SMALL = 1e-6
CONSENSUS = 1e-3
"""Part of what a distance to the mean was, to which it has shrunk at consensus."""
EXACT = 1e-12
"""A distance of this or less is that of exact averaging."""


def apart(x: np.ndarray) -> np.ndarray:
    """Returns how far each row is from the mean of all: x - J x. Where W keeps the mean, (I - J) W = W - J."""
    found: np.ndarray = x - x.mean(axis=0)
    return found


def contraction(graph: Graph) -> float:
    """Factor by which the distance to the mean shrinks per round: ||(I - J) prod W||_2 over a period, per round.

    A graph without a period is judged by its first rounds. 0 when a period averages exactly.
    """
    n = graph.num_nodes
    if n > SPECTRAL_NODES:
        return power_rate(graph) if graph.period is not None else drawn(graph, CONSENSUS)[0]
    product, rounds = np.eye(n), 0
    for rounds in range(1, 1 + (graph.period or SAMPLED_ROUNDS)):
        product = graph.matrix(rounds - 1) @ product
        if graph.period is None and np.linalg.norm(apart(product)) < SMALL:
            break  # of further rounds the sum would show nothing but how it was rounded
    norm = float(np.linalg.norm(apart(product), 2))
    return 0.0 if norm < EXACT else min(norm, 1.0) ** (1.0 / rounds)


def spectral_gap(graph: Graph) -> float:
    """1 - contraction: 1 for exact averaging, 0 for a graph that never mixes."""
    return 1.0 - contraction(graph)


def rounds_to_consensus(graph: Graph) -> int | None:
    """Rounds after which every distance to the mean has shrunk to CONSENSUS of itself; None if it never does. Of a
    graph of more than SPECTRAL_NODES nodes: after which those of a few random vectors have."""
    n = graph.num_nodes
    if n == 1:
        return 0
    if n > SPECTRAL_NODES and graph.period is None:
        return drawn(graph, CONSENSUS)[1]
    rate = contraction(graph)
    if 0 < rate < 1 and graph.period == 1:
        return max(1, math.ceil(math.log(CONSENSUS) / math.log(rate) - 1e-9))
    if n > SPECTRAL_NODES:
        return rounds_of_vectors(graph, CONSENSUS, rate)
    product = np.eye(n)
    for round in range(min(MAX_ROUNDS, 50 * (graph.period or 20))):
        product = graph.matrix(round) @ product
        if np.linalg.norm(apart(product), 2) <= CONSENSUS:
            return round + 1
    return None


def keeps_mean(graph: Graph) -> bool:
    """Whether mixing leaves the mean of all models as it is, in the rounds of a period or in the first ones."""
    n = graph.num_nodes
    for round in range(min(graph.period or SAMPLED_ROUNDS, SAMPLED_ROUNDS)):
        found = graph.entries(round)
        if abs(np.bincount(found.sources, found.weights, n) - 1).max() > 1e-9:
            return False
    return True


def _random_vectors(graph: Graph) -> np.ndarray:
    return apart(np.random.default_rng(0).standard_normal((graph.num_nodes, COLUMNS)))


def drawn(graph: Graph, target: float) -> tuple[float, int | None]:
    """Returns the factor per round, and the rounds until random vectors are at `target` of their distance, of a graph
    that is drawn anew in each round; None where that takes more than MOST_DRAWN."""
    x = _random_vectors(graph)
    first = left = np.linalg.norm(x)
    rounds = 0
    while rounds < MOST_DRAWN and left > target * first:
        x = graph.entries(rounds).mixed(x)
        left = np.linalg.norm(apart(x))
        rounds += 1
    rate = min(1.0, max(float(left / first), 1e-300) ** (1 / max(rounds, 1))) if first else 0.0
    return rate, rounds if left <= target * first else None


def power_rate(graph: Graph) -> float:
    """Returns the factor per round that the product of a period, again and again, comes to on random vectors."""
    assert graph.period is not None
    entries = [graph.entries(r) for r in range(graph.period)]
    x, rate = _random_vectors(graph), 0.0
    for _ in range(max(2, POWER_ROUNDS // len(entries))):
        x = apart(x)
        before = np.linalg.norm(x)
        for each in entries:
            x = each.mixed(x)
        after = np.linalg.norm(apart(x))
        if after < EXACT * before:
            return 0.0
        rate = float(after / before) ** (1 / len(entries))
        x /= after
    return min(rate, 1.0)


def rounds_of_vectors(graph: Graph, target: float, rate: float) -> int | None:
    """Returns the rounds until random vectors are at `target` of their distance, of a graph with a period and a factor
    of `rate` per round; None for more than MOST_ROUNDS, or never."""
    assert graph.period is not None
    if rate >= 1:
        return None
    x = _random_vectors(graph)
    first = np.linalg.norm(x)
    most = graph.period * (2 + (math.ceil(math.log(target) / math.log(rate) / graph.period) if rate > 0 else 0))
    known: dict[int, Entries] = {}
    for round in range(min(most, MOST_ROUNDS)):
        phase = round % graph.period
        if phase not in known:
            known[phase] = graph.entries(phase)
        x = known[phase].mixed(x)
        if np.linalg.norm(apart(x)) <= target * first:
            return round + 1
    return None


def diameter(lists: Lists) -> int | None:
    """Most hops between two nodes; None when not connected."""
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
