"""Measures how fast a graph mixes: spectral gap, rounds to consensus, diameter."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from decentnode.graph.base import Entries, Graph
from decentnode.graph.topology import Lists

MAX_ROUNDS = 100_000
SAMPLED_ROUNDS = 32
SPECTRAL_NODES = 256
"""Larger graphs are measured by the effect of their matrices on random vectors: a spectrum takes n^3 operations."""
COLUMNS = 8
# largest number of rounds of a large graph that are tried: with a period, and without one
MAX_PERIODIC_ROUNDS, MAX_DRAWN_ROUNDS = 20_000, 500
POWER_ROUNDS = 200
SMALL = 1e-6
CONSENSUS = 1e-3
"""Consensus is reached when the distance to the mean has shrunk to this fraction."""
EXACT = 1e-12
"""A relative distance below this counts as exact averaging."""


def deviations(x: np.ndarray) -> np.ndarray:
    """Returns each row's difference from the mean of all rows: x - J x. If W keeps the mean, (I - J) W = W - J."""
    found: np.ndarray = x - x.mean(axis=0)
    return found


def contraction(graph: Graph) -> float:
    """Returns the factor per round by which the distance to the mean shrinks: ||(I - J) prod W||_2 over a period, to
    the power 1 / rounds. 0 if a period averages exactly. For a graph without a period, its first rounds are used."""
    n = graph.num_nodes
    if n > SPECTRAL_NODES:
        return rate_by_power_iteration(graph) if graph.period is not None else measure_drawn_graph(graph, CONSENSUS)[0]
    product, rounds = np.eye(n), 0
    for rounds in range(1, 1 + (graph.period or SAMPLED_ROUNDS)):
        product = graph.matrix(rounds - 1) @ product
        if graph.period is None and np.linalg.norm(deviations(product)) < SMALL:
            break  # more rounds would only measure rounding errors
    norm = float(np.linalg.norm(deviations(product), 2))
    return 0.0 if norm < EXACT else min(norm, 1.0) ** (1.0 / rounds)


def spectral_gap(graph: Graph) -> float:
    """Returns 1 - contraction: 1 for exact averaging, 0 for a graph that never mixes."""
    return 1.0 - contraction(graph)


def rounds_to_consensus(graph: Graph) -> int | None:
    """Returns the number of rounds after which every distance to the mean has shrunk to CONSENSUS of what it was; None
    if it never does. For a graph of more than SPECTRAL_NODES nodes this is measured on a few random vectors."""
    n = graph.num_nodes
    if n == 1:
        return 0
    if n > SPECTRAL_NODES and graph.period is None:
        return measure_drawn_graph(graph, CONSENSUS)[1]
    rate = contraction(graph)
    if 0 < rate < 1 and graph.period == 1:
        return max(1, math.ceil(math.log(CONSENSUS) / math.log(rate) - 1e-9))
    if n > SPECTRAL_NODES:
        return rounds_by_vectors(graph, CONSENSUS, rate)
    product = np.eye(n)
    for round in range(min(MAX_ROUNDS, 50 * (graph.period or 20))):
        product = graph.matrix(round) @ product
        if np.linalg.norm(deviations(product), 2) <= CONSENSUS:
            return round + 1
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


def _random_vectors(graph: Graph) -> np.ndarray:
    return deviations(np.random.default_rng(0).standard_normal((graph.num_nodes, COLUMNS)))


def measure_drawn_graph(graph: Graph, target: float) -> tuple[float, int | None]:
    """Returns, for a graph that is drawn anew in each round, the contraction factor per round and the number of rounds
    until random vectors have shrunk to `target` of their distance from the mean; None if that takes more than
    MAX_DRAWN_ROUNDS rounds."""
    x = _random_vectors(graph)
    initial = distance = np.linalg.norm(x)
    rounds = 0
    while rounds < MAX_DRAWN_ROUNDS and distance > target * initial:
        x = graph.entries(rounds).mixed(x)
        distance = np.linalg.norm(deviations(x))
        rounds += 1
    rate = min(1.0, max(float(distance / initial), 1e-300) ** (1 / max(rounds, 1))) if initial else 0.0
    return rate, rounds if distance <= target * initial else None


def rate_by_power_iteration(graph: Graph) -> float:
    """Returns the contraction factor per round of a graph with a period, measured on random vectors by power iteration
    with the product of the period's matrices."""
    assert graph.period is not None
    entries = [graph.entries(r) for r in range(graph.period)]
    x, rate = _random_vectors(graph), 0.0
    for _ in range(max(2, POWER_ROUNDS // len(entries))):
        x = deviations(x)
        before = np.linalg.norm(x)
        for each in entries:
            x = each.mixed(x)
        after = np.linalg.norm(deviations(x))
        if after < EXACT * before:
            return 0.0
        rate = float(after / before) ** (1 / len(entries))
        x /= after
    return min(rate, 1.0)


def rounds_by_vectors(graph: Graph, target: float, rate: float) -> int | None:
    """Returns the number of rounds until random vectors have shrunk to `target` of their distance from the mean, for a
    graph with a period and a contraction factor of `rate` per round; None if it takes more than MAX_PERIODIC_ROUNDS, or
    never happens."""
    assert graph.period is not None
    if rate >= 1:
        return None
    x = _random_vectors(graph)
    first = np.linalg.norm(x)
    most = graph.period * (2 + (math.ceil(math.log(target) / math.log(rate) / graph.period) if rate > 0 else 0))
    known: dict[int, Entries] = {}
    for round in range(min(most, MAX_PERIODIC_ROUNDS)):
        phase = round % graph.period
        if phase not in known:
            known[phase] = graph.entries(phase)
        x = known[phase].mixed(x)
        if np.linalg.norm(deviations(x)) <= target * first:
            return round + 1
    return None


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
