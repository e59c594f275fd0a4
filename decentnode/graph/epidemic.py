"""Epidemic learning (de Vos et al. 2023, arXiv 2310.01972): every round has new neighbors, drawn at random.

A node's neighbors are computed without those of the other nodes, so that the cost of a view depends on the node's
degree and not on the number of nodes. When many nodes of a round are asked for, the table of all nodes is computed
instead.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode import rng
from decentnode.config import component
from decentnode.errors import GraphError
from decentnode.graph.base import Entries
from decentnode.graph.families import check_regular
from decentnode.graph.permutation import RandomPermutation
from decentnode.graph.topology import CACHED_ROUNDS, Lists, SeededConfig, Topology
from decentnode.graph.weights import MetropolisHastings, Uniform

ROW_COST = 128
"""Computing the neighbors of a single node costs as much as those of this many nodes in the table of a round: 60 us
against 0.5 us per node."""


Rows = dict[int, dict[int, tuple[int, ...]]]
"""Neighbor rows that were computed one node at a time: round -> uid -> uids."""


class EpidemicConfig(SeededConfig):
    degree: int = Field(4, ge=1)
    """Number of nodes to which every node sends in every round; less than `nodes`."""


class Epidemic(Topology):
    """Neighbors that are drawn in every round, row by row or all at once."""

    Config: ClassVar[type[component.Config]] = EpidemicConfig
    config: EpidemicConfig

    def _set_up(self) -> None:
        self.num_nodes, self._degree = self.config.nodes, self.config.degree
        self.period = None
        self._draw_seed = self.config.draw_seed(self.seed)
        self._last_table: tuple[int, np.ndarray] = -1, np.zeros((0, 0), np.int64)
        self._rows: Rows = {}
        self._check()

    @abc.abstractmethod
    def _check(self) -> None:
        """Raises GraphError if the graph cannot have this degree."""

    @abc.abstractmethod
    def _draw_neighbors(self, uid: int, phase: int) -> np.ndarray:
        """Returns the neighbors of one node, in any order."""

    @abc.abstractmethod
    def _draw_table(self, phase: int) -> np.ndarray:
        """Returns the neighbors of all nodes: [n, degree], each row ascending."""

    def targets_table(self, round: int) -> np.ndarray:
        phase = self.phase(round)
        if self._last_table[0] != phase:
            self._last_table = phase, self._draw_table(phase)
        return self._last_table[1]

    def _lists(self, phase: int) -> Lists:
        return list(map(tuple, self.targets_table(phase).tolist()))

    def entries(self, round: int) -> Entries:
        """Returns W of one round, as `Graph.entries` does; computed from the table if a row's weights depend only on
        the number of its sources."""
        targets = self.targets_table(round)
        nodes = np.arange(self.num_nodes)
        rows, sources = (targets.ravel(), np.repeat(nodes, self._degree)) if self.directed else (
            np.repeat(nodes, self._degree), targets.ravel())
        counts = np.bincount(rows, minlength=self.num_nodes)
        weights = self._weights_by_count(counts)
        if weights is None:
            return super().entries(round)
        flat_index = np.sort(np.concatenate([rows, nodes]) * self.num_nodes + np.concatenate([sources, nodes]))
        rows, sources = np.divmod(flat_index, self.num_nodes)
        others, own = weights
        starts = np.concatenate([[0], np.cumsum(counts + 1)[:-1]])
        return Entries(starts, sources, np.where(rows == sources, own[rows], others[rows]))

    def _weights_by_count(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the weight of each source of a node and the weight of the node itself, [n] each, equal to those of
        `weights`; None if the weights depend on more than the number of sources.

        counts: [n], the number of sources of each node.
        """
        if self._weights is None:
            equal = 1.0 / (counts + 1)
            return equal, equal
        if type(self._weights) not in (MetropolisHastings, Uniform) or getattr(self._weights.config, "lazy", False):
            return None
        own_weight = {int(count): 1.0 - sum([1.0 / (1 + int(count))] * int(count)) for count in np.unique(counts)}
        return 1.0 / (counts + 1), np.array([own_weight[count] for count in counts.tolist()])

    def targets(self, uid: int, round: int) -> tuple[int, ...]:
        phase = self.phase(round)
        if phase not in self._out:
            found = self._cached_row(self._rows, uid, phase, self._draw_neighbors)
            if found is not None:
                return found
        return self.lists(round)[uid]

    def _cached_row(
        self, rows: Rows, uid: int, phase: int, compute: Callable[[int, int], np.ndarray]
    ) -> tuple[int, ...] | None:
        """Returns the row of one node, cached by round in `rows`; None if so many rows of this round were asked for
        that the table of all nodes is cheaper."""
        known = rows.get(phase)
        if known is None:
            if len(rows) >= CACHED_ROUNDS:
                rows.pop(next(iter(rows)))
            known = rows[phase] = {}
        if uid not in known:
            if (len(known) + 1) * ROW_COST >= self.num_nodes:
                return None
            known[uid] = tuple(sorted(compute(uid, phase).tolist()))
        return known[uid]

    def degree(self, uid: int, round: int) -> int:  # noqa: ARG002
        return self._degree


class RandomRegular(Epidemic):
    """A new random connected graph in each round, in which every node has `degree` neighbors (EL-Oracle).

    The nodes are permuted at random over the places of a circulant graph, one of whose offsets is 1, and the others are
    drawn. In expectation W is then the same for all pairs of nodes, and so is W^2, as for a graph drawn uniformly from
    all regular ones: E |W x|^2 = (1 / (s + 1)) (1 - s / (n - 1)) |x|^2 for x of mean zero and s neighbors.
    """

    def _check(self) -> None:
        check_regular(self.num_nodes, self._degree, "random_regular")

    def _draw_neighbors(self, uid: int, phase: int) -> np.ndarray:
        places, offsets = self._places(phase)
        at = places(np.array([uid]))
        return places.inverse((at + offsets) % self.num_nodes)

    def _draw_table(self, phase: int) -> np.ndarray:
        places, offsets = self._places(phase)
        nodes = places.inverse(np.arange(self.num_nodes))  # by place
        around = np.arange(self.num_nodes)[:, None] + offsets
        table = np.empty_like(around)
        table[nodes] = np.sort(nodes[around % self.num_nodes], axis=1)
        return table

    def _places(self, phase: int) -> tuple[RandomPermutation, np.ndarray]:
        """Returns each node's position on a circle, and the distances from a node to its neighbors along it:
        [degree]."""
        return _circle(self._draw_seed, phase, self.num_nodes, self._degree)


@lru_cache(maxsize=8)
def _circle(seed: int, round: int, nodes: int, degree: int) -> tuple[RandomPermutation, np.ndarray]:
    draws = rng.stream(seed, rng.GLOBAL, "regular graph", round)
    max_hop = (nodes - 1) // 2
    hops = np.zeros(0, np.int64)
    if degree > 1:
        hops = np.array([1, *(2 + draws.choice(max_hop - 1, degree // 2 - 1, replace=False))], np.int64)
    half = [nodes // 2] if degree % 2 else []
    return RandomPermutation(nodes, draws), np.concatenate([hops, nodes - hops, half]).astype(np.int64)


class EpidemicLocal(Epidemic):
    """In each round, every node independently draws `degree` others to send to (EL-Local); how many nodes send to it is
    random. It takes the plain mean of its own model and the received ones, which keeps the mean of all models only in
    expectation.

    As draws follow from the seed, a node knows who sends to it, and waits for them.
    """

    directed = True
    own_weights = True

    def _check(self) -> None:
        self._rows_in: Rows = {}
        if self._degree >= self.num_nodes:
            raise GraphError(f"el_local: degree must be below {self.num_nodes}, the number of nodes, "
                             f"got {self._degree}")  # fmt: skip

    def _draw_neighbors(self, uid: int, phase: int) -> np.ndarray:
        return self._draw_targets(range(uid, uid + 1), phase)[0]

    def _draw_table(self, phase: int) -> np.ndarray:
        return np.sort(self._draw_targets(range(self.num_nodes), phase), axis=1)

    def senders(self, uid: int, round: int) -> tuple[int, ...]:
        """As `Topology.senders`. Even for a single node this scans the table of all draws, at the cost of n numbers."""
        phase = self.phase(round)
        if phase not in self._in:
            found = self._cached_row(self._rows_in, uid, phase, self._find_sources)
            if found is not None:
                return found
        return self.in_lists(round)[uid]

    def _find_sources(self, uid: int, phase: int) -> np.ndarray:
        """Returns the nodes that drew this one as a target."""
        return np.unique(np.flatnonzero(self.targets_table(phase) == uid) // self._degree)

    def _draw_targets(self, uids: range, phase: int) -> np.ndarray:
        """Returns for each uid a set of `degree` other nodes, all sets being equally likely (Floyd's algorithm; Bentley
        1987): [uids, degree]."""
        words = rng.words(self._draw_seed, "epidemic targets", phase, uids, self._degree)
        chosen = np.empty(words.shape, np.int64)
        for k in range(self._degree):
            last = self.num_nodes - 1 - self._degree + k
            drawn = (words[:, k] % np.uint64(last + 1)).astype(np.int64)
            taken = (chosen[:, :k] == drawn[:, None]).any(axis=1)
            chosen[:, k] = np.where(taken, last, drawn)
        return chosen + (chosen >= np.array(uids)[:, None])

    def _row(self, uid: int, phase: int) -> dict[int, float]:
        sources = self.senders(uid, phase)
        return dict.fromkeys((uid, *sources), 1.0 / (len(sources) + 1))
