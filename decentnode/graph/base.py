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
"""Two mixing weights that differ by at most this are treated as equal."""


PARTNER_ROUNDS = 64
"""`Graph.partners` goes through the rounds of a period of at most this many rounds."""


class Entries(NamedTuple):
    """The entries of W that are not zero, and those of the diagonal, in CSR format: row by row."""

    starts: np.ndarray  # [n] int64, where each row begins
    sources: np.ndarray  # int64, the columns
    weights: np.ndarray  # float64

    def mixed(self, x: np.ndarray) -> np.ndarray:
        """Returns W x. x: [n, columns]."""
        found: np.ndarray = np.add.reduceat(self.weights[:, None] * x[self.sources], self.starts)
        return found


class Graph(abc.ABC):
    """A graph is a pure function of (parameters, seed, round, members that are alive): it has no state and sends no
    messages.

    Every node computes the same result. uids are 0 .. num_nodes - 1. `members` are the uids that are still alive (None:
    all); an edge to or from a node that is not alive does not exist, and its weight is added to the receiver's own.
    """

    num_nodes: int
    period: int | None
    """Number of rounds after which the sequence of edges repeats: 1 for a static graph, None if it never repeats."""
    directed: bool
    servers: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """The clients of each server, ascending; empty for a graph without servers. Every node that is not a server is the
    client of one."""

    def between(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:  # noqa: ARG002
        """Returns row `uid` of the mixing matrix among the servers: the weight of each server that `uid` receives from,
        and of `uid` itself. For a node that is not a server, the row has only the node itself."""
        return {uid: 1.0}

    @abc.abstractmethod
    def neighbors(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        """Returns the uids that `uid` sends to in `round`, ascending, never `uid` itself."""

    @abc.abstractmethod
    def sources(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        """Returns the uids that `uid` receives from in `round`, ascending; equal to `neighbors` if the graph is
        undirected."""

    @abc.abstractmethod
    def weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        """Returns row `uid` of W: the weight of each source and of `uid` itself, keys ascending, summing to one."""

    @abc.abstractmethod
    def out_weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        """Returns the column-stochastic shares that `uid` sends (push-sum), itself included, summing to one."""

    def partners(self, uid: int) -> frozenset[int] | None:
        """Returns every node that `uid` ever sends to or receives from; None if the period is too long to go through
        (PARTNER_ROUNDS) or the graph has none."""
        if self.period is None or self.period > PARTNER_ROUNDS:
            return None
        rounds = range(self.period)
        return frozenset(other for r in rounds for other in (*self.neighbors(uid, r), *self.sources(uid, r)))

    def targets_table(self, round: int) -> np.ndarray | None:  # noqa: ARG002
        """Returns the neighbors of all nodes in `round` at once: [n, degree] int64, rows ascending, not to be modified
        by the caller. None if the graph can compute them only node by node, where a table would not be much cheaper."""
        return None

    def entries(self, round: int) -> Entries:
        """Returns W of one round as a sparse matrix."""
        rows = [self.weights(uid, round) for uid in range(self.num_nodes)]
        starts = np.cumsum([0, *map(len, rows[:-1])], dtype=np.int64)
        sources = np.array([source for row in rows for source in row], np.int64)
        return Entries(starts, sources, np.array([weight for row in rows for weight in row.values()]))

    def matrix(self, round: int, members: Collection[int] | None = None) -> np.ndarray:
        """Returns W of one round: [n, n] float64, where W[i, j] is the weight that i gives to what j sent. With
        `members`, only their rows and columns, uids ascending."""
        if members is not None:
            uids, alive = sorted(members), frozenset(members)
            rows = [self.weights(uid, round, alive) for uid in uids]
            return np.array([[row.get(source, 0.0) for source in uids] for row in rows])
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
    """Row of W, the node itself included; keys ascending."""
    out_weights: dict[int, float]
    members: tuple[int, ...]
    seed: int = 0
    phase: int = 0
    fragment: int = 0
    """Index of the fragment of the parameters that is exchanged; 0 if the model is exchanged as a whole."""
    generation: int = 0
    lr: float = 1.0
    """Learning rate of the round's local steps (lr_t), or of the first of them if it changes within the round. 1 if the
    learning rate is not known: what a rule accumulates is then in units of updates."""
    extra: dict[str, object] = field(default_factory=dict)
    averaging_group: tuple[int, ...] = ()
    """uids, ascending, of a set of nodes that contains this one, and whose members each exchange with all other
    members, with no other node, and with one equal weight for all of them. Every member knows this. Empty if there is
    no such set."""
    servers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """`Graph.servers`, including servers that are not members."""
    between: Mapping[int, float] = field(default_factory=dict)
    """`Graph.between` of this node."""

    def rng(self, purpose: str) -> np.random.Generator:
        """Returns the random stream of this node, round, fragment and purpose."""
        return rng.stream(self.seed, self.uid, self.purpose(purpose), self.round)

    def purpose(self, text: str) -> str:
        """Returns the name of a random draw that must differ between the fragments of one round."""
        return f"{text}, fragment {self.fragment}" if self.fragment else text

    def alone(self) -> RoundView:
        """Returns this round without neighbors."""
        return replace(
            self, neighbors=(), sources=(), weights={self.uid: 1.0}, out_weights={self.uid: 1.0}, averaging_group=()
        )

    def part_way(self, factor: float) -> RoundView:
        """Returns this round with partial mixing: the node moves to x + factor (W x - x)."""
        weights = {j: factor * w for j, w in self.weights.items()}
        weights[self.uid] += 1.0 - factor
        return replace(self, weights=weights)

    def mean_of(self, arrived: Collection[int]) -> RoundView:
        """Returns this round with exactly the payloads of these nodes received: each has the same weight as the node's
        own model."""
        weights = dict.fromkeys(sorted({self.uid, *arrived}), 1.0 / (len(arrived) + 1))
        return replace(self, sources=tuple(sorted(arrived)), weights=weights, averaging_group=())

    def without(self, missing: Collection[int]) -> RoundView:
        """Returns this round with the payloads of `missing` left out: the node itself gets their weights."""
        if not missing:
            return self
        sources = tuple(j for j in self.sources if j not in missing)
        return replace(self, sources=sources, weights=self._reassigned(self.weights, missing), averaging_group=())

    def among(self, members: Collection[int]) -> RoundView:
        """Returns this round with only `members` as neighbors: the node itself gets the weights of the edges to all
        others."""
        gone = {*self.neighbors, *self.sources}.difference(members)
        if not gone:
            return self
        neighbors = tuple(j for j in self.neighbors if j not in gone)
        return replace(self.without(gone), neighbors=neighbors, out_weights=self._reassigned(self.out_weights, gone))

    def _reassigned(self, weights: dict[int, float], gone: Collection[int]) -> dict[int, float]:
        remaining = {j: w for j, w in weights.items() if j not in gone}
        remaining[self.uid] = weights[self.uid] + sum(weights.get(j, 0.0) for j in gone)
        return remaining

    @property
    def averaging(self) -> tuple[int, ...]:
        """Returns `averaging_group`, or an empty tuple if a rule has since changed the neighbors or weights of this
        view."""
        others = tuple(uid for uid in self.averaging_group if uid != self.uid)
        alike = self.neighbors == self.sources == others and _has_equal_weights(self.weights, self.uid)
        return self.averaging_group if alike else ()


def parts(graph: Graph, members: Collection[int], rounds: int) -> list[set[int]]:
    """Returns the sets of members that can reach each other, directly or through other members, in rounds 0 .. rounds -
    1 and their repetitions; the set with the lowest uid first. In a directed graph these are the strongly connected
    components (Sharir 1981): a node may receive from another set, but two sets cannot reach each other in both
    directions."""
    targets: dict[int, set[int]] = {uid: set() for uid in sorted(members)}
    sources: dict[int, set[int]] = {uid: set() for uid in targets}
    for uid in targets:
        for round in range(rounds):
            for other in graph.neighbors(uid, round, members):
                targets[uid].add(other)
                sources[other].add(uid)
    finished: list[int] = []
    seen: set[int] = set()
    for start in targets:
        path = [] if start in seen else [(start, iter(targets[start]))]
        seen.add(start)
        while path:
            uid, unvisited = path[-1]
            next_uid = next((other for other in unvisited if other not in seen), None)
            if next_uid is None:
                finished.append(path.pop()[0])
            else:
                seen.add(next_uid)
                path.append((next_uid, iter(targets[next_uid])))
    found = []
    for start in reversed(finished):
        part, frontier = set(), {start} & seen
        while frontier:
            part |= frontier
            seen -= frontier
            frontier = {other for uid in frontier for other in sources[uid]} & seen
        if part:
            found.append(part)
    return sorted(found, key=min)


def view(
    graph: Graph, uid: int, round: int, seed: int = 0, members: Collection[int] | None = None, at: int | None = None
) -> RoundView:
    """Returns what node `uid` sees of `round`, with the edges that the graph has in its round `at` (default: `round`).

    The two differ because rounds without an exchange count for a run, but not for its graph
    (`Sharing.exchange_number`).
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
    """Returns the members in ascending order; 0 to count - 1 if `members` is None. The result for a frozenset is
    cached."""
    if members is None:
        return _all_uids(count)
    return _sorted(members) if isinstance(members, frozenset) else tuple(sorted(members))


@functools.lru_cache(maxsize=16)
def _sorted(members: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(members))


@functools.lru_cache(maxsize=16)
def _all_uids(count: int) -> tuple[int, ...]:
    """Returns the uids 0 to count - 1. All views share one tuple: in a process with ten thousand nodes, a tuple for
    each would take 800 MB."""
    return tuple(range(count))


def view_without_exchange(
    graph: Graph, uid: int, round: int, seed: int = 0, members: Collection[int] | None = None
) -> RoundView:
    """Returns what node `uid` sees of a round without an exchange."""
    uids = _ascending(members, graph.num_nodes)
    return RoundView(uid, round, (), (), {uid: 1.0}, {uid: 1.0}, uids, seed)


def averaging_group_of(graph: Graph, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
    """Returns `RoundView.averaging_group` of node `uid` in a graph: a clique that contains it, whose members have no
    edges to other nodes."""
    averaging_group = tuple(sorted({uid, *graph.sources(uid, round, members)}))
    if len(averaging_group) < 2:
        return ()
    for each in (uid, *averaging_group):  # `uid` first: for most graphs its own row already rules a group out
        others = tuple(other for other in averaging_group if other != each)
        if graph.neighbors(each, round, members) != others or graph.sources(each, round, members) != others:
            return ()
        if not _has_equal_weights(graph.weights(each, round, members), each):
            return ()
    return averaging_group


def _has_equal_weights(weights: Mapping[int, float], uid: int) -> bool:
    """Returns whether a row of W gives every node other than `uid` the same weight."""
    others = [weight for source, weight in weights.items() if source != uid]
    return max(others, default=0.0) - min(others, default=0.0) <= EQUAL
