"""Graphs given by neighbor lists per round and a rule for the weights: the base class of every family and schedule."""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.config.component import Component, Config
from decentnode.errors import GraphError
from decentnode.graph.base import Graph
from decentnode.graph.weights import MetropolisHastings, MetropolisHastingsConfig, Weights

CACHED_ROUNDS = 64

Lists = Sequence[tuple[int, ...]]
"""For each uid, the uids that it sends to, ascending."""


class NodesConfig(Config):
    nodes: int = Field(ge=1, le=1 << 20)
    """Number of nodes of the graph."""


class Topology(Component, Graph):
    """Neighbor lists of the rounds of a period, or of any round, cached; the weights are the family's own or come from
    a rule."""

    Config: ClassVar[type[component.Config]] = NodesConfig
    directed = False
    own_weights: ClassVar[bool] = False
    """Whether the family overrides `_row`, because it is exact or stochastic only with its own weights."""

    def __init__(
        self, config: component.Config, *, seed: int, base_dir: Path = Path(), weights: Weights | None = None
    ) -> None:
        """seed: the run's, which random families use unless their config has a seed. weights: None for the family's
        own. Raises GraphError if the family cannot be made with this number of nodes."""
        self.config = config
        self.seed = seed
        self.base_dir = base_dir
        self.period: int | None = 1
        self._out: dict[int, Lists] = {}
        self._in: dict[int, Lists] = {}
        self._set_up()
        self._weights = weights
        if weights is None and not self.own_weights:
            self._weights = MetropolisHastings(MetropolisHastingsConfig())
        if self._weights is not None:
            self._weights.prepare(self)

    @abc.abstractmethod
    def _set_up(self) -> None:
        """Sets num_nodes and period. Raises GraphError for parameters that the family does not support."""

    @abc.abstractmethod
    def _lists(self, phase: int) -> Lists:
        """Returns the out-neighbors of all nodes in rounds of this phase, which is round % period, or the round itself
        if there is no period."""

    def _row(self, uid: int, phase: int) -> dict[int, float]:
        """Returns row `uid` of W with the family's own weights."""
        raise NotImplementedError

    def phase(self, round: int) -> int:
        return round if self.period is None else round % self.period

    def lists(self, round: int) -> Lists:
        """Returns the out-neighbors of every uid in `round`."""
        phase = self.phase(round)
        found = self._out.get(phase)
        if found is None:
            if self.period is None and len(self._out) >= CACHED_ROUNDS:
                self._out.pop(next(iter(self._out)))
            found = self._out[phase] = self._lists(phase)
        return found

    def in_lists(self, round: int) -> Lists:
        """Returns the sources of every uid in `round`."""
        if not self.directed:
            return self.lists(round)
        phase = self.phase(round)
        found = self._in.get(phase)
        if found is None:
            if self.period is None and len(self._in) >= CACHED_ROUNDS:
                self._in.pop(next(iter(self._in)))
            sources: list[list[int]] = [[] for _ in range(self.num_nodes)]
            for uid, targets in enumerate(self.lists(round)):
                for target in targets:
                    sources[target].append(uid)
            found = self._in[phase] = [tuple(each) for each in sources]
        return found

    def targets(self, uid: int, round: int) -> tuple[int, ...]:
        """Returns the out-neighbors of one node in `round`; cheaper than `lists` if the family computes them node by
        node."""
        return self.lists(round)[uid]

    def senders(self, uid: int, round: int) -> tuple[int, ...]:
        """Returns the sources of one node in `round`; cheaper than `in_lists` if the family computes them node by
        node."""
        return self.in_lists(round)[uid] if self.directed else self.targets(uid, round)

    def degree(self, uid: int, round: int) -> int:
        """Returns the number of out-neighbors of one node in `round`."""
        return len(self.targets(uid, round))

    def neighbors(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return _filter_alive(self.targets(self._check_uid(uid), round), uid, members)

    def sources(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return _filter_alive(self.senders(self._check_uid(uid), round), uid, members)

    def weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        self._check_uid(uid)
        row = self._row(uid, self.phase(round)) if self._weights is None else self._weights.row(self, uid, round)
        return _return_weights_of_dead(dict(sorted(row.items())), uid, members)

    def out_weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        targets = self.neighbors(uid, round, members)
        share = 1.0 / (len(targets) + 1)
        return dict.fromkeys(sorted((uid, *targets)), share)

    def _check_uid(self, uid: int) -> int:
        if not 0 <= uid < self.num_nodes:
            raise GraphError(f"uid must be in [0, {self.num_nodes}), got {uid}")
        return uid


def _filter_alive(uids: tuple[int, ...], uid: int, members: Collection[int] | None) -> tuple[int, ...]:
    if members is None:
        return uids
    return tuple(j for j in uids if j in members) if uid in members else ()


def _return_weights_of_dead(row: dict[int, float], uid: int, members: Collection[int] | None) -> dict[int, float]:
    """Returns a row of W in which the weights of dead sources are added to the receiver's own."""
    if members is None:
        return row
    if uid not in members:
        return {uid: 1.0}
    kept = {j: w for j, w in row.items() if j in members}
    kept[uid] = kept.get(uid, 0.0) + sum(w for j, w in row.items() if j not in members)
    return dict(sorted(kept.items()))


def adjacency(num_nodes: int, edges: Collection[tuple[int, int]]) -> Lists:
    """Returns the neighbor lists of an undirected graph; double edges count once. Raises GraphError for a self-loop."""
    sets: list[set[int]] = [set() for _ in range(num_nodes)]
    for i, j in edges:
        if i == j:
            raise GraphError(f"an edge must join two nodes, got {i} - {j}")
        sets[i].add(j)
        sets[j].add(i)
    return [tuple(sorted(each)) for each in sets]


def components(lists: Lists) -> list[list[int]]:
    """Returns the connected components of an undirected graph, each ascending, the one with node 0 first."""
    seen: set[int] = set()
    parts = []
    for start in range(len(lists)):
        if start in seen:
            continue
        seen.add(start)
        part, frontier = [start], [start]
        while frontier:
            frontier = [j for i in frontier for j in lists[i] if not (j in seen or seen.add(j))]  # type: ignore[func-returns-value]
            part += frontier
        parts.append(sorted(part))
    return parts


class StaticTopology(Topology):
    """A topology with the same edges in all rounds."""

    config: NodesConfig

    def _set_up(self) -> None:
        self.num_nodes = self.config.nodes
        self._static = adjacency(self.num_nodes, self._edges())

    @abc.abstractmethod
    def _edges(self) -> Collection[tuple[int, int]]: ...

    def _lists(self, phase: int) -> Lists:  # noqa: ARG002
        return self._static


class SeededConfig(NodesConfig):
    seed: int | None = Field(None, ge=0)
    """Seed of the random graph. Default: the run's seed."""

    def draw_seed(self, run_seed: int) -> int:
        return run_seed if self.seed is None else self.seed
