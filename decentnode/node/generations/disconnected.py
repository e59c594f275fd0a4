"""Finds and describes graphs that are disconnected without the absent nodes, or in which members lack neighbors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from decentnode.graph.base import Graph, parts
from decentnode.graph.repaired import Edge, Repaired, examined_rounds


@dataclass(frozen=True)
class DisconnectedGraph:
    """A graph that, without the absent nodes, does not connect all members."""

    parts: list[list[int]]
    """The connected components of members, the one with the lowest uid first."""
    edges: list[Edge]
    """The edges that are added to connect the components; empty if these continue separately."""

    def __str__(self) -> str:
        others = " and ".join(f"nodes {', '.join(map(str, part))}" for part in self.parts[1:])
        sentence = f"the graph no longer connects {others} to the others"
        if not self.edges:
            return f"{sentence}; they continue separately (node.repair: none)"
        return f"{sentence}; edges added: {', '.join(f'{i} - {j}' for i, j in self.edges)}"


def disconnected_graphs(graphs: Iterable[Graph], members: Sequence[int]) -> Iterator[DisconnectedGraph]:
    """Yields a description of each of the graphs that is disconnected among the members; a graph given twice counts
    once."""
    for graph in {id(graph): graph for graph in graphs}.values():
        edges, original = [], graph
        if isinstance(graph, Repaired):
            edges, original = graph.edges(members), graph.graph
            if not edges:
                continue
        components = [sorted(part) for part in parts(original, members, examined_rounds(original))]
        if len(components) > 1:
            yield DisconnectedGraph(components, edges)


def lacking_neighbors(graphs: Iterable[Graph], members: Sequence[int], needed: int) -> list[int]:
    """Returns the members, ascending, that receive from fewer than `needed` others in a round of one of the graphs."""
    rounds = [(graph, round) for graph in graphs for round in range(examined_rounds(graph))] if needed else []
    return [uid for uid in sorted(members)
            if any(len(graph.sources(uid, round, members)) < needed for graph, round in rounds)]  # fmt: skip
