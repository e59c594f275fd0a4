"""MATCHA: the edges of a base graph in matchings, each active at random, and more often if it matters more for
mixing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from decentnode import rng
from decentnode.config import component
from decentnode.config.component import Config, load_class, section
from decentnode.errors import GraphError
from decentnode.graph import STATIC
from decentnode.graph.optima import optimum
from decentnode.graph.topology import Lists, SeededConfig, Topology, components

MAX_NODES = 128
"""Largest base graph, in nodes: its eigenvalues are computed some two hundred times before a run starts."""
DIGITS = 6
"""Decimal digits to which probabilities and weights are rounded: eigenvalues differ in their last bits between
machines, and the edges must not."""
SMOOTHING = (0.1, 0.03, 0.01, 0.003)
"""Widths of the soft minimum of the eigenvalues, relative to the mean degree. The maximization with each width starts
from the result of the one before."""
STEPS = 30
"""Largest number of gradient steps for each width."""

Edge = tuple[int, int]


class MatchaConfig(SeededConfig):
    base: Annotated[Config, section(STATIC, "graph", implied={"file": "file"})]
    """The static graph whose edges are used; it has as many nodes as this one."""
    budget: float = Field(0.5, gt=0, le=1)
    """The mean fraction of the matchings that are on in a round. 1 is the base graph in every round."""


class Matcha(Topology):
    """Every matching j of the base graph is on with probability p_j in a round; W = I - alpha L of those that are on.

    Wang et al. 2019, arXiv 1905.09435. An edge coloring cuts the base graph into matchings, at most one more than its
    largest degree. The p_j, whose mean is `budget`, maximize the second smallest eigenvalue of the expected Laplacian,
    and alpha minimizes the expected contraction ||E[W^2] - J||, among those with which no weight is negative: the paper
    allows weights of the own model below zero.
    """

    Config: ClassVar[type[component.Config]] = MatchaConfig
    config: MatchaConfig
    own_weights = True

    def _set_up(self) -> None:
        n = self.num_nodes = self.config.nodes
        chosen = self.config.base
        base = load_class(chosen.name, STATIC, "graph")(chosen, seed=self.seed, base_dir=self.base_dir)
        assert isinstance(base, Topology)
        if base.num_nodes != n:
            raise GraphError(f"matcha: base must have {n} nodes, got {base.num_nodes}")
        if n > MAX_NODES:
            raise GraphError(f"matcha serves {MAX_NODES} nodes at most, got {n}; random_matching serves every number")
        if base.directed or len(components(base.lists(0))) > 1:
            raise GraphError(f"matcha: base must be an undirected, connected graph, got {chosen.name}")
        self.period = None if self.config.budget < 1 and n > 1 else 1
        self._draw_seed = self.config.draw_seed(self.seed)
        self.matchings = matchings_of(base.lists(0))
        found = optimum(f"matcha {n} {self.matchings} {self.config.budget!r}", self._optimize)
        self.probabilities = np.array(found[:-2])
        self.alpha, self.expected = found[-2:]
        """The weight of every edge; and ||E[W^2] - J||, the factor per round of the expected squared distance."""

    def _optimize(self) -> list[float]:
        """Returns the probability of every matching, then alpha and ||E[W^2] - J||."""
        n = self.num_nodes
        laplacians = np.array([laplacian(n, matching) for matching in self.matchings]).reshape(-1, n, n)
        probabilities = probabilities_of(laplacians, self.config.budget)
        return [*probabilities.tolist(), *best_alpha(laplacians, probabilities)]

    def _lists(self, phase: int) -> Lists:
        draws = rng.stream(self._draw_seed, rng.GLOBAL, "matcha", phase).random(len(self.matchings))
        lists: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for matching, on in zip(self.matchings, draws < self.probabilities, strict=True):
            for i, j in matching if on else ():
                lists[i].append(j)
                lists[j].append(i)
        return [tuple(sorted(each)) for each in lists]

    def _row(self, uid: int, phase: int) -> dict[int, float]:
        others = self.lists(phase)[uid]
        return {**dict.fromkeys(others, self.alpha), uid: 1.0 - self.alpha * len(others)}


def matchings_of(lists: Lists) -> list[list[Edge]]:
    """Returns the edges of an undirected graph as matchings, at most one more than its largest degree, the largest
    matching first (edge coloring by fans and alternating paths, Misra and Gries 1992)."""
    colors = max(map(len, lists), default=0) + 1
    by_color: list[dict[int, int]] = [{} for _ in lists]  # by_color[u][color]: the other end of u's edge of this color

    def free_color(uid: int) -> int:
        return next(color for color in range(colors) if color not in by_color[uid])

    def color_of(uid: int, other: int) -> int:
        return next(color for color, end in by_color[uid].items() if end == other)

    def set_color(uid: int, other: int, color: int) -> None:
        by_color[uid][color], by_color[other][color] = other, uid

    for u, others in enumerate(lists):
        for first in (other for other in others if other > u):
            fan = [first]
            while True:  # a maximal fan: the color of u's edge to each node of it is free at the node before
                last = by_color[fan[-1]]
                free_at_last = (v for color, v in sorted(by_color[u].items()) if color not in last)
                next_node = next((v for v in free_at_last if v not in fan), None)
                if next_node is None:
                    break
                fan.append(next_node)
            c, d = free_color(u), free_color(fan[-1])
            _swap_colors(by_color, u, c, d)
            end = next(k for k in range(len(fan))
                       if d not in by_color[fan[k]] and _is_fan(by_color, u, fan[: k + 1], color_of))  # fmt: skip
            shifted = [color_of(u, fan[k + 1]) for k in range(end)]
            for k in range(end):
                del by_color[fan[k + 1]][shifted[k]]
            for k in range(end):
                set_color(u, fan[k], shifted[k])
            set_color(u, fan[end], d)
    found = [[(u, v) for u, ends in enumerate(by_color) if (v := ends.get(color, -1)) > u] for color in range(colors)]
    return sorted((each for each in found if each), key=lambda matching: -len(matching))


def _swap_colors(by_color: list[dict[int, int]], u: int, c: int, d: int) -> None:
    """Exchanges the colors c and d along the path that starts at u and whose edges alternate between them; c is free at
    u."""
    path, color = [u], d
    while (following := by_color[path[-1]].get(color)) is not None:
        path.append(following)
        color = c if color == d else d
    edges = [(a, b, c if k % 2 else d) for k, (a, b) in enumerate(itertools.pairwise(path))]
    for a, b, old in edges:
        del by_color[a][old], by_color[b][old]
    for a, b, old in edges:
        new = c if old == d else d
        by_color[a][new], by_color[b][new] = b, a


def _is_fan(by_color: list[dict[int, int]], u: int, fan: list[int], color_of: Callable[[int, int], int]) -> bool:
    return all(color_of(u, later) not in by_color[sooner] for sooner, later in itertools.pairwise(fan))


def laplacian(n: int, edges: list[Edge]) -> np.ndarray:
    found = np.zeros((n, n))
    for i, j in edges:
        found[i, i] += 1
        found[j, j] += 1
        found[i, j] = found[j, i] = -1
    return found


def probabilities_of(laplacians: np.ndarray, budget: float) -> np.ndarray:
    """Returns the p with 0 <= p <= 1 and mean `budget` that maximize the second smallest eigenvalue of sum_j p_j L_j.

    laplacians: [matchings, n, n]. This eigenvalue has no gradient where it is a double eigenvalue, as on rings and
    tori, and its eigenvectors are then not unique. The soft minimum of all eigenvalues except that of the mean has a
    gradient, which does not depend on the choice of eigenvectors, so that the results of two machines differ only by
    rounding. p is found by gradient ascent on it.
    """
    count = len(laplacians)
    p = np.full(count, budget)
    if count < 2 or budget == 1:
        return p
    n = laplacians.shape[1]
    degree = float(np.trace(laplacians.sum(0))) / n * budget
    for width in SMOOTHING:
        mu, length = width * degree, width
        value, slope = _soft_minimum(laplacians, p, mu)
        for _ in range(STEPS):
            new = _project(p + length * slope, budget)
            better, next_slope = _soft_minimum(laplacians, new, mu)
            if better > value + 1e-9 * degree:
                p, value, slope, length = new, better, next_slope, 2 * length
            elif (length := length / 4) < 1e-4 * width:
                break
    rounded: np.ndarray = p.round(DIGITS)
    even = np.full(count, budget)
    return even if connectivity(laplacians, even) > connectivity(laplacians, rounded) - 1e-6 else rounded


def connectivity(laplacians: np.ndarray, p: np.ndarray) -> float:
    """Returns the second smallest eigenvalue of sum_j p_j L_j."""
    return float(np.linalg.eigvalsh(np.tensordot(p, laplacians, 1))[1])


def _soft_minimum(laplacians: np.ndarray, p: np.ndarray, mu: float) -> tuple[float, np.ndarray]:
    """Returns -mu log sum_k exp(-lambda_k / mu) over all eigenvalues except that of the mean, and its gradient with
    respect to p."""
    n = laplacians.shape[1]
    total = np.tensordot(p, laplacians, 1)
    high = 2 * float(laplacians.sum(0).diagonal().max()) + 1  # puts the mean's above the others, to be left out
    values, vectors = np.linalg.eigh(total + high / n)
    least, values, vectors = values[0], values[:-1], vectors[:, :-1]
    weights = np.exp(-(values - least) / mu)
    sum_of = weights.sum()
    projector = (vectors * (weights / sum_of)) @ vectors.T
    slope: np.ndarray = laplacians.reshape(len(laplacians), -1) @ projector.ravel()
    return float(least - mu * np.log(sum_of)), slope


def _project(p: np.ndarray, budget: float) -> np.ndarray:
    """Returns the point nearest to p with entries in [0, 1] and mean `budget`."""
    low, high = float(p.min()) - 1, float(p.max())
    for _ in range(60):
        shift = (low + high) / 2
        if np.clip(p - shift, 0, 1).mean() > budget:
            low = shift
        else:
            high = shift
    found: np.ndarray = np.clip(p - (low + high) / 2, 0, 1)
    return found


def best_alpha(laplacians: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """Returns the alpha that minimizes ||E[W^2] - J||, and this norm.

    E[W^2] = I - 2 alpha E[L] + alpha^2 (E[L]^2 + 2 sum_j p_j (1 - p_j) L_j), because L_j^2 = 2 L_j for a matching. The
    norm is convex in alpha. So that no node's own weight becomes negative, alpha is at most 1 / the largest degree.
    """
    n = laplacians.shape[1]
    if len(laplacians) == 0:
        return 0.0, 0.0
    expected = np.tensordot(p, laplacians, 1)
    square = expected @ expected + 2 * np.tensordot(p * (1 - p), laplacians, 1)

    def norm(alpha: float) -> float:
        matrix = np.eye(n) - 1.0 / n - 2 * alpha * expected + alpha**2 * square
        return float(np.linalg.eigvalsh(matrix)[-1])

    low, high = 0.0, 1.0 / float(laplacians.sum(0).diagonal().max())
    while high - low > 1e-7:
        third = (high - low) / 3
        if norm(low + third) < norm(high - third):
            high -= third
        else:
            low += third
    alpha = float(np.floor((low + high) / 2 * 10**DIGITS)) / 10**DIGITS
    return alpha, norm(alpha)
