"""How fast a graph mixes."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from decentnode.graph.base import Graph
from decentnode.graph.topology import Lists

MAX_ROUNDS = 100_000
SAMPLED_ROUNDS = 32


def contraction(graph: Graph) -> float:
    """Factor by which the distance to the mean shrinks per round: ||prod W - J||_2 over a period, per round.

    A graph without a period is judged by its first rounds. 0 when a period averages exactly.
    """
    n = graph.num_nodes
    rounds = graph.period or SAMPLED_ROUNDS
    product = np.eye(n)
    for round in range(rounds):
        product = graph.matrix(round) @ product
    norm = float(np.linalg.norm(product - 1.0 / n, 2))
    return 0.0 if norm < 1e-12 else min(norm, 1.0) ** (1.0 / rounds)


def spectral_gap(graph: Graph) -> float:
    """1 - contraction: 1 for exact averaging, 0 for a graph that never mixes."""
    return 1.0 - contraction(graph)


def rounds_to_consensus(graph: Graph, distance: float = 1e-3) -> int | None:
    """Rounds after which every distance to the mean has shrunk to `distance` of itself; None if it never does."""
    n = graph.num_nodes
    if n == 1:
        return 0
    rate = contraction(graph)
    if 0 < rate < 1 and graph.period == 1:
        return max(1, math.ceil(math.log(distance) / math.log(rate) - 1e-9))
    product = np.eye(n)
    for round in range(min(MAX_ROUNDS, 50 * (graph.period or 20))):
        product = graph.matrix(round) @ product
        if np.linalg.norm(product - 1.0 / n, 2) <= distance:
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
