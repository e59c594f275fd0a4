"""The contract of a graph: who sends to whom in which round, and with which mixing weight."""

from __future__ import annotations

import abc
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from decentnode import rng

EQUAL = 1e-9
"""Weights that differ by no more are the same."""


PARTNER_ROUNDS = 64
"""The longest period that `Graph.partners` goes through."""


class Entries(NamedTuple):
    """The entries of W that are not zero, and those of the diagonal, row by row."""

    starts: np.ndarray  # [n] int64, where each row begins
    sources: np.ndarray  # int64, the columns
    weights: np.ndarray  # float64

    def mixed(self, x: np.ndarray) -> np.ndarray:
        """Returns W x. x: [n, columns]."""
        found: np.ndarray = np.add.reduceat(self.weights[:, None] * x[self.sources], self.starts)
        return found


class Graph(abc.ABC):
    """A pure function of (parameters, seed, round, alive members): no state, no messages.

    Every node computes the same answer. uids are 0 .. num_nodes - 1. `members` are the uids still alive
    (None: all); an edge with a dead end does not exist, and its weight goes back to the receiver's own.
    """

    num_nodes: int
    period: int | None
    """Rounds after which the sequence repeats: 1 for a static graph, None if it never does."""
    directed: bool
    servers: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """The nodes that serve others, each with its clients, ascending; empty of a graph among equals. Every other node is
    the client of one of them."""

    def between(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:  # noqa: ARG002
        """Row of the mixing matrix of the servers alone: weight of each server that `uid` hears of, and of itself. Of a
        node that is no server it is the node's own."""
        return {uid: 1.0}

    @abc.abstractmethod
    def neighbors(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        """The uids that `uid` sends to in `round`, ascending, never `uid` itself."""

    @abc.abstractmethod
    def sources(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        """The uids that `uid` receives from in `round`, ascending; equal to `neighbors` if undirected."""

    @abc.abstractmethod
    def weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        """Row `uid` of W: weight of each source and of `uid` itself, keys ascending, summing to one."""

    @abc.abstractmethod
    def out_weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        """Column-stochastic shares that `uid` sends, itself included, summing to one (push-sum)."""

    def partners(self, uid: int) -> frozenset[int] | None:
        """Everybody that `uid` ever sends to or receives from; None where it would take many rounds to find out."""
        if self.period is None or self.period > PARTNER_ROUNDS:
            return None
        rounds = range(self.period)
        return frozenset(other for r in rounds for other in (*self.neighbors(uid, r), *self.sources(uid, r)))

    def targets_table(self, round: int) -> np.ndarray | None:  # noqa: ARG002
        """The neighbors of all nodes in `round` at once, where that costs much less than one by one: [n, degree] int64,
        rows ascending. None of a graph that has them one by one alone. Not to be modified."""
        return None

    def entries(self, round: int) -> Entries:
        """W of one round, without its zeros."""
        rows = [self.weights(uid, round) for uid in range(self.num_nodes)]
        starts = np.cumsum([0, *map(len, rows[:-1])], dtype=np.int64)
        sources = np.array([source for row in rows for source in row], np.int64)
        return Entries(starts, sources, np.array([weight for row in rows for weight in row.values()]))

    def matrix(self, round: int) -> np.ndarray:
        """W of one round: [n, n] float64, W[i, j] the weight that i gives to what j sent."""
        w, found = np.zeros((self.num_nodes, self.num_nodes)), self.entries(round)
        counts = np.diff(found.starts, append=len(found.sources))
        w[np.repeat(np.arange(self.num_nodes), counts), found.sources] = found.weights
        return w


@dataclass(frozen=True)
class RoundView:
    """What a sharing rule may know of one round of its own node."""

    uid: int
    round: int
    neighbors: tuple[int, ...]
    sources: tuple[int, ...]
    weights: dict[int, float]
    """Row of W with the node itself in it; keys ascending."""
    out_weights: dict[int, float]
    members: tuple[int, ...]
    seed: int = 0
    phase: int = 0
    fragment: int = 0
    """Which of the run's fragments of the parameters is exchanged; 0 where the model is exchanged as a whole."""
    generation: int = 0
    lr: float = 1.0
    """Learning rate of the round's local steps (lr_t), of the first of them where it changes within the round; 1 where
    nobody told it: what a rule keeps is then in units of updates."""
    extra: dict[str, object] = field(default_factory=dict)
    averaging_group: tuple[int, ...] = ()
    """Nodes, this one among them, that all exchange with all others of them and with nobody else, each with one weight
    for all others, ascending: every one of them knows. Empty where there are none."""
    servers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """`Graph.servers`, those that are no members among them."""
    between: Mapping[int, float] = field(default_factory=dict)
    """`Graph.between` of this node."""

    def rng(self, purpose: str) -> np.random.Generator:
        """A stream of this node, round, fragment and purpose."""
        return rng.stream(self.seed, self.uid, self.purpose(purpose), self.round)

    def purpose(self, text: str) -> str:
        """Returns the purpose of a draw that is to differ between the fragments of one round."""
        return f"{text}, fragment {self.fragment}" if self.fragment else text

    def alone(self) -> RoundView:
        """The same round without neighbors."""
        return replace(
            self, neighbors=(), sources=(), weights={self.uid: 1.0}, out_weights={self.uid: 1.0}, averaging_group=()
        )

    def part_way(self, factor: float) -> RoundView:
        """The same round when the node goes a part of the way: x + factor (W x - x)."""
        weights = {j: factor * w for j, w in self.weights.items()}
        weights[self.uid] += 1.0 - factor
        return replace(self, weights=weights)

    def mean_of(self, came: Collection[int]) -> RoundView:
        """The same round when the payloads of exactly these nodes came: each has the weight of the node's own."""
        weights = dict.fromkeys(sorted({self.uid, *came}), 1.0 / (len(came) + 1))
        return replace(self, sources=tuple(sorted(came)), weights=weights, averaging_group=())

    def without(self, missing: Collection[int]) -> RoundView:
        """The same round when the payloads of `missing` never come: their weights go to the node itself."""
        if not missing:
            return self
        sources = tuple(j for j in self.sources if j not in missing)
        return replace(self, sources=sources, weights=self._kept(self.weights, missing), averaging_group=())

    def among(self, members: Collection[int]) -> RoundView:
        """The same round with nobody but `members`: what edges to others weigh goes to the node itself."""
        gone = {*self.neighbors, *self.sources}.difference(members)
        if not gone:
            return self
        neighbors = tuple(j for j in self.neighbors if j not in gone)
        return replace(self.without(gone), neighbors=neighbors, out_weights=self._kept(self.out_weights, gone))

    def _kept(self, weights: dict[int, float], gone: Collection[int]) -> dict[int, float]:
        kept = {j: w for j, w in weights.items() if j not in gone}
        kept[self.uid] = weights[self.uid] + sum(weights.get(j, 0.0) for j in gone)
        return kept

    @property
    def averaging(self) -> tuple[int, ...]:
        """`averaging_group`, unless a rule has made other neighbors or weights of those that it came with: then
        none."""
        others = tuple(uid for uid in self.averaging_group if uid != self.uid)
        alike = self.neighbors == self.sources == others and _alike(self.weights, self.uid)
        return self.averaging_group if alike else ()


def parts(graph: Graph, members: Collection[int], rounds: int) -> list[set[int]]:
    """The sets of members that hear of each other, over other members perhaps, in rounds 0 .. rounds - 1 and their
    repetitions; the one with the lowest uid first. In a directed graph a node may hear of another set, but not both of
    each other (strongly connected components; Sharir 1981)."""
    to: dict[int, set[int]] = {uid: set() for uid in sorted(members)}
    of: dict[int, set[int]] = {uid: set() for uid in to}
    for uid in to:
        for round in range(rounds):
            for other in graph.neighbors(uid, round, members):
                to[uid].add(other)
                of[other].add(uid)
    finished: list[int] = []
    seen: set[int] = set()
    for start in to:
        path = [] if start in seen else [(start, iter(to[start]))]
        seen.add(start)
        while path:
            uid, ahead = path[-1]
            following = next((other for other in ahead if other not in seen), None)
            if following is None:
                finished.append(path.pop()[0])
            else:
                seen.add(following)
                path.append((following, iter(to[following])))
    found = []
    for start in reversed(finished):
        part, edge = set(), {start} & seen
        while edge:
            part |= edge
            seen -= edge
            edge = {other for uid in edge for other in of[uid]} & seen
        if part:
            found.append(part)
    return sorted(found, key=min)


def view(
    graph: Graph, uid: int, round: int, seed: int = 0, members: Collection[int] | None = None, at: int | None = None
) -> RoundView:
    """What node `uid` sees of `round`, with the edges that the graph has in its round `at` (when not given, `round`).

    Rounds in which nobody exchanges count for a run, but not for its graph (`Sharing.exchange_number`).
    """
    at = round if at is None else at
    found = RoundView(
        uid,
        round,
        graph.neighbors(uid, at, members),
        graph.sources(uid, at, members),
        graph.weights(uid, at, members),
        graph.out_weights(uid, at, members),
        _ascending(members, graph.num_nodes),
        seed,
    )
    if not graph.servers:
        return found
    return replace(found, servers=graph.servers, between=graph.between(uid, at, members))


def _ascending(members: Collection[int] | None, count: int) -> tuple[int, ...]:
    """Returns the members in ascending order; all of 0 to count - 1 for None. A frozenset is put in order once."""
    if members is None:
        return _everybody(count)
    return _in_order(members) if isinstance(members, frozenset) else tuple(sorted(members))


@functools.lru_cache(maxsize=16)
def _in_order(members: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(members))


@functools.lru_cache(maxsize=16)
def _everybody(count: int) -> tuple[int, ...]:
    """Returns the uids 0 to count - 1: one tuple for all views, which in a process with ten thousand nodes would be
    800 MB of them."""
    return tuple(range(count))


def view_at_rest(
    graph: Graph, uid: int, round: int, seed: int = 0, members: Collection[int] | None = None
) -> RoundView:
    """What node `uid` sees of a round in which nobody exchanges."""
    everybody = _ascending(members, graph.num_nodes)
    return RoundView(uid, round, (), (), {uid: 1.0}, {uid: 1.0}, everybody, seed)


def averaging_group_of(graph: Graph, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
    """What `RoundView.averaging_group` says of node `uid` in a graph: a clique of it that nobody else has an edge
    to."""
    averaging_group = tuple(sorted({uid, *graph.sources(uid, round, members)}))
    if len(averaging_group) < 2:
        return ()
    for each in (uid, *averaging_group):  # the own row says no most of the time
        others = tuple(other for other in averaging_group if other != each)
        if graph.neighbors(each, round, members) != others or graph.sources(each, round, members) != others:
            return ()
        if not _alike(graph.weights(each, round, members), each):
            return ()
    return averaging_group


def _alike(weights: Mapping[int, float], uid: int) -> bool:
    """Whether a row of W gives all but the node itself one weight."""
    others = [weight for source, weight in weights.items() if source != uid]
    return max(others, default=0.0) - min(others, default=0.0) <= EQUAL
