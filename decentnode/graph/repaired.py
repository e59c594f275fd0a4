"""A graph with additional edges that reconnect its members if the absence of nodes disconnects them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from decentnode import rng
from decentnode.graph.base import Graph, parts
from decentnode.graph.growing import Growing

EXAMINED_ROUNDS = 16
"""To find out whether a time-varying graph is connected, the edges of this many rounds are used, or of one period if
that is shorter."""

Repair = Literal["none", "ring", "random"]
Edge = tuple[int, int]


def examined_rounds(graph: Graph) -> int:
    """Returns the number of rounds whose edges together decide whether a graph is connected."""
    return min(graph.period or EXAMINED_ROUNDS, EXAMINED_ROUNDS)


class Repaired(Graph):
    """A graph in which the members of a generation are connected, whichever nodes are absent.

    If the members fall apart into parts that cannot reach each other (`parts`; in a directed graph: not in both
    directions), undirected edges between the parts are added in every round. They are a function of (seed, graph,
    members) alone: all members compute the same edges without messages. The graph's own edges stay, and nothing is
    added while the members are connected.

    An added edge i - j has the weight min(w_i, w_j), where w_i is the weight that i gives itself, divided by one more
    than the number of its added edges; both ends give this weight up from their own. So W stays non-negative, and the
    sums of rows and columns do not change. Only nodes that lost edges are joined (if the graph was connected, each part
    has one), and for those w_i > 0.

    Such edges may lower the smallest eigenvalue of W. For rules that need a lower bound on it, w_i is instead half of
    the weight l_i that i lost with its absent neighbors, divided by the number of its added edges: since the sum over
    added edges of a_ij (x_i - x_j)^2 <= sum_i l_i x_i^2, no eigenvalue is then below the smallest one with all nodes
    present.
    """

    def __init__(self, graph: Graph, repair: Repair, seed: int, keeps_eigenvalues: bool = False) -> None:
        """repair: see `NodeConfig.repair`. seed: of random edges. keeps_eigenvalues: whether no eigenvalue of W may be
        smaller than the smallest one with all nodes present."""
        self._keeps_eigenvalues = keeps_eigenvalues
        self.graph, self._repair, self._seed = graph, repair, seed
        self.num_nodes, self.directed, self.period = graph.num_nodes, graph.directed, graph.period
        self.servers = graph.servers
        self._last: tuple[Collection[int] | None, dict[int, tuple[int, ...]]] = None, {}

    def edges(self, members: Collection[int]) -> list[Edge]:
        """Returns the edges (i, j), i < j, that are added for these members, ascending; none if the members are
        connected."""
        added = self._added_edges(members)
        return sorted((uid, other) for uid, others in added.items() for other in others if uid < other)

    def _added_edges(self, members: Collection[int] | None) -> dict[int, tuple[int, ...]]:
        """Returns the other ends of each node's added edges, ascending: uid -> uids."""
        last, found = self._last
        if members is None or last is members:
            return {} if members is None else found
        if last is None or {*last} != {*members}:
            found = self._find_edges(members)
        self._last = members, found
        return found

    def _find_edges(self, members: Collection[int]) -> dict[int, tuple[int, ...]]:
        components = parts(self.graph, members, examined_rounds(self.graph))
        found: dict[int, set[int]] = {}
        ends = [self._attachable_nodes(part, members) for part in components]
        for i, j in REPAIRS[self._repair](ends, self._seed) if len(components) > 1 else ():
            found.setdefault(i, set()).add(j)
            found.setdefault(j, set()).add(i)
        return {uid: tuple(sorted(others)) for uid, others in found.items()}

    def _attachable_nodes(self, part: Collection[int], members: Collection[int]) -> list[int]:
        """Returns the nodes of a part that lost edges, those that lost most first; all nodes of the part if none lost
        any."""
        graph, complete = self.graph, self._graph_without_absences(members)
        lost = {
            uid: sum(len(complete.sources(uid, round)) - len(graph.sources(uid, round, members))
                     + len(complete.neighbors(uid, round)) - len(graph.neighbors(uid, round, members))
                     for round in range(examined_rounds(graph)))
            for uid in part
        }  # fmt: skip
        order = sorted(part, key=lambda uid: (-lost[uid], uid))
        return [uid for uid in order if lost[uid]] or order

    def neighbors(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return self._with_added(uid, self.graph.neighbors(uid, round, members), members)

    def sources(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return self._with_added(uid, self.graph.sources(uid, round, members), members)

    def _with_added(self, uid: int, uids: tuple[int, ...], members: Collection[int] | None) -> tuple[int, ...]:
        added = self._added_edges(members).get(uid)
        return tuple(sorted({*uids, *added})) if added else uids

    def weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        row, added = self.graph.weights(uid, round, members), self._added_edges(members)
        if uid not in added:
            return row
        row, own = dict(row), self._weight_share(uid, round, members, len(added[uid]))
        for other in added[uid]:
            moved = min(own, self._weight_share(other, round, members, len(added[other])))
            row[other] = row.get(other, 0.0) + moved
            row[uid] -= moved
        return dict(sorted(row.items()))

    def _weight_share(self, uid: int, round: int, members: Collection[int] | None, count: int) -> float:
        """Returns w_i, as defined in the class docstring, of a node with `count` added edges."""
        own = self.graph.weights(uid, round, members).get(uid, 0.0)
        if not self._keeps_eigenvalues:
            return max(own, 0.0) / (1 + count)
        lost = own - self._graph_without_absences(members).weights(uid, round).get(uid, 0.0)
        return max(lost, 0.0) / (2 * count)

    def _graph_without_absences(self, members: Collection[int] | None) -> Graph:
        """Returns the graph of this generation's size with no node absent."""
        return self.graph.among(members) if isinstance(self.graph, Growing) else self.graph

    def out_weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        row, added = self.graph.out_weights(uid, round, members), self._added_edges(members).get(uid, ())
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
        """Returns None, which means any node: which nodes are joined depends on which are absent."""
        return None


def _join_in_ring(ends: list[list[int]], seed: int) -> list[Edge]:  # noqa: ARG001
    """Joins the parts in a ring, through two different nodes of each part that has two, so that a ring that lost nodes
    becomes a ring again."""
    following = [*ends[1:], ends[0]]
    return [(part[0], other[min(1, len(other) - 1)]) for part, other in zip(ends, following, strict=True)]


def _join_in_random_tree(ends: list[list[int]], seed: int) -> list[Edge]:
    """Joins the parts in a random tree: takes them in random order and joins each, through one random node, to one of
    the parts before it."""
    draw = rng.stream(seed, rng.GLOBAL, "edges between the parts of a graph")
    order = [ends[int(k)] for k in draw.permutation(len(ends))]
    return [(int(draw.choice(order[k])), int(draw.choice(order[int(draw.integers(k))]))) for k in range(1, len(order))]


REPAIRS: dict[str, Callable[[list[list[int]], int], list[Edge]]] = {
    "none": lambda _ends, _seed: [], "ring": _join_in_ring, "random": _join_in_random_tree,
}  # fmt: skip
"""By `node.repair`: the function that returns the edges between parts, given the nodes of each part that may be
joined."""
