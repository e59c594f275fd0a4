"""A graph that grows with the membership: new nodes get the uids after those of the first nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from decentnode.errors import GraphError
from decentnode.graph.base import Graph

CACHED_SIZES = 4
"""Largest number of graphs of different sizes that are cached; the one made first is dropped first."""


class Growing(Graph):
    """The graph of a family, made for as many nodes as the generation has uids.

    If the highest uid of a generation is u >= n, its edges are those that the family has with u + 1 nodes; if all its
    members are nodes of the mapping, they are those of the original n nodes. The edges are a function of the members
    alone, so that all members compute the same edges without messages. When the size changes, every edge may change.
    """

    def __init__(self, first: Graph, make_graph: Callable[[int], Graph]) -> None:
        """first: the graph of the nodes in the mapping. make_graph(count): makes the same family with more nodes;
        raises GraphError."""
        self.first, self._make_graph = first, make_graph
        self.num_nodes, self.directed = first.num_nodes, first.directed
        self.period = 1 if first.period == 1 else None  # the period of a sequence changes with its size
        self.servers = first.servers
        self._cached: dict[int, Graph] = {}
        self._last: tuple[Collection[int] | None, Graph] = None, first

    def among(self, members: Collection[int] | None) -> Graph:
        """Returns the graph of a generation with these members."""
        if members is None:
            return self.first
        if self._last[0] is not members:
            self._last = members, self._graph_of_size(max(members, default=0) + 1)
        return self._last[1]

    def _graph_of_size(self, count: int) -> Graph:
        if count <= self.num_nodes:
            return self.first
        if count not in self._cached:
            while len(self._cached) >= CACHED_SIZES:
                del self._cached[next(iter(self._cached))]
            self._cached[count] = self._make_graph(count)
        return self._cached[count]

    def neighbors(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return self.among(members).neighbors(uid, round, members)

    def sources(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        return self.among(members).sources(uid, round, members)

    def weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        return self.among(members).weights(uid, round, members)

    def out_weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        return self.among(members).out_weights(uid, round, members)

    def partners(self, uid: int) -> frozenset[int] | None:  # noqa: ARG002
        """Returns None, which means any node: a node that joins later may become a neighbor of any node."""
        return None


def check_growth(name: str, graph: Graph, make_graph: Callable[[int], Graph], most: int) -> None:
    """Raises GraphError, which names the family, unless the family can be made for each of the next `most` sizes and is
    static in all of them or in none. A graph with servers cannot grow: the role of a new node would be undefined."""
    if graph.servers:
        raise GraphError(f"graph {name} cannot grow: a newcomer would be neither a server nor the client of one")
    for count in range(graph.num_nodes + 1, graph.num_nodes + most + 1):
        made = make_graph(count)
        if made.num_nodes != count:
            raise GraphError(f"graph {name} cannot grow: its number of nodes follows from its other keys")
        if (graph.period == 1) != (made.period == 1):
            raise GraphError(f"graph {name} cannot grow to {count} nodes: it would begin to change from round to round")
