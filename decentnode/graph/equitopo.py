"""EquiTopo (Song et al. 2022, arXiv 2210.07881): graphs that mix at a rate which does not depend on the number of
nodes.

A^(u) is the matrix in which every node gives the weight (n - 1) / n to the node u places before it on a circle, and
1 / n to itself. The mean of all n - 1 of these matrices is J. The static graphs use the mean of a few of them, the
others one of them per round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode import rng
from decentnode.config import component
from decentnode.errors import GraphError
from decentnode.graph.optima import optimum
from decentnode.graph.schedules import GroupSchedule
from decentnode.graph.topology import Lists, SeededConfig, Topology

DRAWS = 32
"""Number of random sets of offsets, of which the one with the lowest rate is used."""
DIGITS = 6
"""Decimal digits to which rates are rounded before they are compared: they differ in their last bits between machines,
and the edges must not."""
RATE = 0.5


def rates(n: int, sets: np.ndarray) -> np.ndarray:
    """Returns rho = ||W - J||_2 of the mean W of A^(u) over each set of offsets u, rounded: [sets]. From the
    eigenvalues of W, which are the Fourier coefficients of a row.

    sets: [sets, offsets] int64, each row distinct and in 1 .. n - 1.
    """
    found = np.empty(len(sets))
    for number, offsets in enumerate(sets):
        row = np.zeros(n)
        row[0], row[offsets] = 1 / n, (n - 1) / n / len(offsets)
        found[number] = np.abs(np.fft.rfft(row)[1:]).max(initial=0.0)
    return found.round(DIGITS)


def best_offsets(n: int, degree: int, symmetric: bool, seed: int) -> tuple[float, list[int]]:
    """Returns the lowest rate among DRAWS random sets of `degree` distinct offsets, and the set, ascending.

    symmetric: whether -u (mod n) is in the set for each u of it; `degree` must then be even or n be even.
    """
    draws = rng.stream(seed, rng.GLOBAL, "equitopo offsets", degree)
    below, count = ((n - 1) // 2, degree // 2) if symmetric else (n - 1, degree)
    sets = np.array([1 + draws.choice(below, count, replace=False) for _ in range(DRAWS)])
    if symmetric:
        half = np.full((DRAWS, degree % 2), n // 2)
        sets = np.concatenate([sets, n - sets, half], axis=1).astype(np.int64)
    found = rates(n, sets)
    best = min(range(DRAWS), key=lambda k: (found[k], math.gcd(n, *sets[k].tolist())))
    return float(found[best]), sorted(sets[best].tolist())


class EquiStaticConfig(SeededConfig):
    degree: int | None = Field(None, ge=1)
    """Number of nodes to which every node sends. Default: the smallest with which `rate` is reached, which grows with
    the logarithm of `nodes`."""
    rate: float | None = Field(None, gt=0, lt=1)
    """Largest factor by which a round shrinks the distance of the models to their mean (rho). Default: 0.5. Not
    together with `degree`."""


class EquiStatic(Topology):
    """A static graph in which node i sends to i + u (mod n) for every u of a random set of offsets.

    The paper draws offsets independently, so that a node may have fewer neighbors than draws, and its bound on the rate
    holds with some probability. Here the offsets are distinct, and the best of DRAWS sets is taken.
    """

    Config: ClassVar[type[component.Config]] = EquiStaticConfig
    config: EquiStaticConfig
    own_weights = True

    def _set_up(self) -> None:
        n = self.num_nodes = self.config.nodes
        if self.config.degree is not None and self.config.rate is not None:
            raise GraphError(f"{self.config.name} takes degree or rate, not both")
        self._check_degree(self.config.degree)
        problem = f"equistatic {self.directed} {self.config.draw_seed(self.seed)} {self.config!r}"
        self.offsets = [int(offset) for offset in optimum(problem, self._find_offsets)] if n > 1 else []

    def _degrees(self) -> Sequence[int]:
        """Returns the degrees with which the graph may be connected, ascending."""
        n = self.num_nodes
        return range(1, n) if self.directed or n < 3 else range(2, n, 1 + n % 2)

    def _check_degree(self, degree: int | None) -> None:
        degrees = self._degrees()
        if degree is not None and self.num_nodes > 1 and degree not in degrees:
            possible = min(degrees, key=lambda each: abs(each - degree))
            raise GraphError(f"{self.config.name}: no connected graph of {self.num_nodes} nodes has degree {degree}; "
                             f"try degree {possible}")  # fmt: skip

    def _find_offsets(self) -> list[float]:
        n, degree, seed = self.num_nodes, self.config.degree, self.config.draw_seed(self.seed)
        rate = RATE if self.config.rate is None else self.config.rate

        def is_reached(degree: int) -> bool:
            return best_offsets(n, degree, not self.directed, seed)[0] <= rate

        if degree is None:
            # not a bisection: the rate of random sets does not fall with every degree; the largest degree has rate 0
            degree = next(filter(is_reached, self._degrees()))
        offsets = best_offsets(n, degree, not self.directed, seed)[1]
        if math.gcd(n, *offsets) > 1:
            raise GraphError(f"{self.config.name}: no connected graph of {n} nodes and degree {degree} in {DRAWS} "
                             "draws; try a higher degree or another seed")  # fmt: skip
        return [*map(float, offsets)]

    def _lists(self, phase: int) -> Lists:  # noqa: ARG002
        n = self.num_nodes
        return [tuple(sorted((uid + offset) % n for offset in self.offsets)) for uid in range(n)]

    def _row(self, uid: int, phase: int) -> dict[int, float]:  # noqa: ARG002
        n = self.num_nodes
        others = [(uid - offset) % n for offset in self.offsets]
        return {uid: 1 / n, **dict.fromkeys(others, (n - 1) / n / max(1, len(others)))}


class DEquiStatic(EquiStatic):
    """D-EquiStatic of EquiTopo: directed."""

    directed = True


class UEquiStatic(EquiStatic):
    """U-EquiStatic of EquiTopo: undirected; half of the offsets are the negatives of the others."""


class EquiDynConfig(SeededConfig):
    offsets: int | None = Field(None, ge=1)
    """Number of different offsets (M) that the rounds draw from; a node exchanges with at most twice as many others in
    a run. Default: all nodes - 1, which mixes fastest."""


class EquiDyn(Topology):
    """One random offset u per round, of all offsets or of those of a `d_equistatic` graph."""

    Config: ClassVar[type[component.Config]] = EquiDynConfig
    config: EquiDynConfig

    def _set_up(self) -> None:
        n, count = self.config.nodes, self.config.offsets
        self.num_nodes, self.period = n, None if n > 1 else 1
        self._draw_seed = self.config.draw_seed(self.seed)
        self.offsets: Sequence[int] = range(1, n)
        if count is not None and count < n - 1:
            self.offsets = best_offsets(n, count, False, self._draw_seed)[1]
        elif count is not None and count > n - 1 > 0:
            raise GraphError(f"{self.config.name}: offsets must be at most {n - 1} for {n} nodes, got {count}")

    def _draw(self, phase: int) -> tuple[int, int]:
        """Returns the offset u of a round, and a random node."""
        draws = rng.stream(self._draw_seed, rng.GLOBAL, "equidyn", phase)
        return self.offsets[int(draws.integers(len(self.offsets)))], int(draws.integers(self.num_nodes))


class ODEquiDyn(EquiDyn):
    """OD-EquiDyn of EquiTopo: in each round, every node sends to the node u places after it, with a new random u.

    W = (I + the permutation) / 2: (1 - eta) I + eta A^(u) with eta = n / (2 (n - 1)). From all offsets, the expected
    squared distance falls by the factor (1 / 2) (1 - 1 / (n - 1)) per round.
    """

    directed = True
    own_weights = True

    def _lists(self, phase: int) -> Lists:
        n, offset = self.num_nodes, self._draw(phase)[0] if self.num_nodes > 1 else 0
        return [((uid + offset) % n,) if offset else () for uid in range(n)]

    def _row(self, uid: int, phase: int) -> dict[int, float]:
        sources = self.in_lists(phase)[uid]
        return dict.fromkeys((uid, *sources), 1 / (len(sources) + 1))


class OUEquiDyn(EquiDyn, GroupSchedule):
    """OU-EquiDyn of EquiTopo: in each round, pairs of nodes u places apart take their mean, with a new random u.

    Pairs are made in the order of the circle from a random node; at least two thirds of the nodes are in one. From all
    offsets, the expected squared distance falls at least by the factor 2 / 3 per round.
    """

    def _groups(self, phase: int) -> list[list[int]]:
        n = self.num_nodes
        if n == 1:
            return []
        offset, start = self._draw(phase)
        paired, groups = [False] * n, []
        for place in range(start, start + n):
            pair = [place % n, (place + offset) % n]
            if not any(paired[uid] for uid in pair):
                groups.append(pair)
                for uid in pair:
                    paired[uid] = True
        return groups
