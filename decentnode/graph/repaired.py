"""A graph with edges that join its members again where without the absent nodes it falls apart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from decentnode import rng
from decentnode.graph.base import Graph, parts
from decentnode.graph.growing import Growing

LOOKED_AT = 16
"""Rounds of a graph that changes from round to round whose edges are looked at, or its period if that is shorter."""

Repair = Literal["none", "ring", "random"]
Edge = tuple[int, int]


def rounds_looked_at(graph: Graph) -> int:
    """Returns how many rounds say whether a graph has fallen apart."""
    return min(graph.period or LOOKED_AT, LOOKED_AT)


class Repaired(Graph):
    """A graph of which the members of a generation hear of each other, whoever is absent.

    Where the members fall apart into parts without a path between them, undirected edges are added between the parts in
    every round. They are a function of (seed, graph, members) alone: all members compute the same without asking each
    other. Edges of the graph stay, and nothing is added while one path is left.

    An added edge i - j weighs min(w_i, w_j), with w_i the weight that i gives itself divided by one more than the
    number of its added edges, and takes it from both ends. So W stays non-negative, and rows and columns sum to what
    they did before. Only nodes that lost edges are joined (each part has one where the graph was connected), and for
    their weights w_i > 0.

    Such edges may lower the smallest eigenvalue of W. For rules that bear none below a bound, w_i is half the weight
    l_i that i lost with its absent neighbors, divided by the number of its added edges: since the sum over added edges
    of a_ij (x_i - x_j)^2 <= sum_i l_i x_i^2, no eigenvalue is then below the smallest one with everybody there.
    """

    def __init__(self, graph: Graph, how: Repair, seed: int, keeps_eigenvalues: bool = False) -> None:
        """how: see `NodeConfig.repair`. seed: of random edges. keeps_eigenvalues: whether no eigenvalue of W may be
        below those with everybody there."""
        self._keeps_eigenvalues = keeps_eigenvalues
        self.graph, self._how, self._seed = graph, how, seed
        self.num_nodes, self.directed, self.period = graph.num_nodes, graph.directed, graph.period
        self.servers = graph.servers
        self._last: tuple[Collection[int] | None, dict[int, tuple[int, ...]]] = None, {}

    def edges(self, members: Collection[int]) -> list[Edge]:
        """Returns the edges (i, j), i < j, that are added for these members, ascending; none where they are joined."""
        return sorted((uid, other) for uid, others in self._added(members).items() for other in others if uid < other)

    def _added(self, members: Collection[int] | None) -> dict[int, tuple[int, ...]]:
        """Returns uid -> the other ends of its added edges, ascending."""
        last, found = self._last
        if members is None or last is members:
            return {} if members is None else found
        if last is None or {*last} != {*members}:
            found = self._found(members)
        self._last = members, found
        return found

    def _found(self, members: Collection[int]) -> dict[int, tuple[int, ...]]:
        apart = parts(self.graph, members, rounds_looked_at(self.graph))
        found: dict[int, set[int]] = {}
        ends = [self._ends(part, members) for part in apart]
        for i, j in JOINING[self._how](ends, self._seed) if len(apart) > 1 else ():
            found.setdefault(i, set()).add(j)
            found.setdefault(j, set()).add(i)
        return {uid: tuple(sorted(others)) for uid, others in found.items()}

    def _ends(self, part: Collection[int], members: Collection[int]) -> list[int]:
        """Returns those of a part that lost edges, who lost most first; all of it where nobody did."""
        graph, whole = self.graph, self._whole(members)
        lost = {
            uid: sum(len(whole.sources(uid, round)) - len(graph.sources(uid, round, members))
                     + len(whole.neighbors(uid, round)) - len(graph.neighbors(uid, round, members))
                     for round in range(rounds_looked_at(graph)))
            for uid in part
        }  # fmt: skip
        order = sorted(part, key=lambda uid: (-lost[uid], uid))
        return [uid for uid in order if lost[uid]] or order

    def neighbors(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return self._with(uid, self.graph.neighbors(uid, round, members), members)

    def sources(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return self._with(uid, self.graph.sources(uid, round, members), members)

    def _with(self, uid: int, uids: tuple[int, ...], members: Collection[int] | None) -> tuple[int, ...]:
        added = self._added(members).get(uid)
        return tuple(sorted({*uids, *added})) if added else uids

    def weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        row, added = self.graph.weights(uid, round, members), self._added(members)
        if uid not in added:
            return row
        row, own = dict(row), self._share(uid, round, members, len(added[uid]))
        for other in added[uid]:
            moved = min(own, self._share(other, round, members, len(added[other])))
            row[other] = row.get(other, 0.0) + moved
            row[uid] -= moved
        return dict(sorted(row.items()))

    def _share(self, uid: int, round: int, members: Collection[int] | None, count: int) -> float:
        """Returns w_i of the class's docstring for a node with so many added edges."""
        own = self.graph.weights(uid, round, members).get(uid, 0.0)
        if not self._keeps_eigenvalues:
            return max(own, 0.0) / (1 + count)
        lost = own - self._whole(members).weights(uid, round).get(uid, 0.0)
        return max(lost, 0.0) / (2 * count)

    def _whole(self, members: Collection[int] | None) -> Graph:
        """Returns the graph that, of these members, was without some of its nodes."""
        return self.graph.among(members) if isinstance(self.graph, Growing) else self.graph

    def out_weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        row, added = self.graph.out_weights(uid, round, members), self._added(members).get(uid, ())
        if not added:
            return row
        share = row[uid] / (1 + len(added))
        row = {**row, uid: share}
        for other in added:
            row[other] = row.get(other, 0.0) + share
        return dict(sorted(row.items()))

    def between(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        return self.graph.between(uid, round, members)

    def partners(self, uid: int) -> frozenset[int] | None:  # noqa: ARG002
        """Anybody: whom a node is joined to depends on who is absent."""
        return None


def _ring(ends: list[list[int]], seed: int) -> list[Edge]:  # noqa: ARG001
    """Joins the parts in a ring, each by two of its nodes where it has two: a ring that lost nodes is one again."""
    following = [*ends[1:], ends[0]]
    return [(part[0], other[min(1, len(other) - 1)]) for part, other in zip(ends, following, strict=True)]


def _random(ends: list[list[int]], seed: int) -> list[Edge]:
    """Joins the parts in a random tree: in random order, each to one of those before it, by one node of each."""
    draw = rng.stream(seed, rng.GLOBAL, "edges between the parts of a graph")
    order = [ends[int(k)] for k in draw.permutation(len(ends))]
    return [(int(draw.choice(order[k])), int(draw.choice(order[int(draw.integers(k))]))) for k in range(1, len(order))]


JOINING: dict[str, Callable[[list[list[int]], int], list[Edge]]] = {
    "none": lambda _ends, _seed: [], "ring": _ring, "random": _random,
}  # fmt: skip
"""By `node.repair`: the edges between parts, each given by the nodes that may be joined."""
