"""Topologies as Decent-DP's scripts write them, as lists of edges by round, and the graphs that they define."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist

from decentnode.errors import GraphError
from decentnode.graph.base import Graph
from decentnode.parallel.planning.topologies import make_topology


@dataclass
class Edge:
    """Ranks that mix with each other in one round, all with the same weights."""

    ranks: list[int]
    weight: float
    """A rank's weight of its own model; the others share 1 - weight equally."""
    group: Any = None
    """Always None here: ranks exchange without a process group per edge."""


class Topology:
    """A sequence of rounds that repeats; a subclass returns the edges of every round from `_get_topo_edges`.

    There it can use `_rank`, `_world_size`, `_local_world_size` and `_n_nodes`, the number of machines.
    """

    def __init__(self, local_world_size: int) -> None:
        """Not blocking. Raises ValueError, naming round and rank, unless every rank is in one edge of every round."""
        if not dist.is_initialized():
            raise ValueError("the process group must be initialized first: decentnode.parallel.initialize_dist()")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._local_world_size = local_world_size
        if local_world_size < 1 or self._world_size % local_world_size:
            raise ValueError(f"the local world size must divide {self._world_size} ranks, got {local_world_size}")
        self._n_nodes = self._world_size // local_world_size
        self._rounds = self._get_topo_edges()
        self._validate_edges(self._rounds)
        self._edges = [next(edge for edge in edges if self._rank in edge.ranks) for edges in self._rounds]

    def _get_topo_edges(self) -> list[list[Edge]]:
        raise NotImplementedError(f"{type(self).__name__} must define _get_topo_edges")

    def _validate_edges(self, edges: Sequence[Sequence[Edge]]) -> None:
        if not edges:
            raise ValueError(f"topology {type(self).__name__} must have at least one round, got none")
        for number, found in enumerate(edges):
            where = f"round {number} of topology {type(self).__name__}"
            used: set[int] = set()
            for edge in found:
                edge.ranks.sort()
                for rank in edge.ranks:
                    if not 0 <= rank < self._world_size:
                        raise ValueError(f"{where} must have ranks below {self._world_size}, got {rank}")
                    if rank in used:
                        raise ValueError(f"{where} must have every rank once, got rank {rank} twice")
                    used.add(rank)
                if not 0.0 <= edge.weight <= 1.0 or (len(edge.ranks) == 1 and edge.weight != 1.0):
                    bound = "1 for a rank that is alone" if len(edge.ranks) == 1 else "in [0, 1]"
                    raise ValueError(f"{where}: the weight of ranks {edge.ranks} must be {bound}, got {edge.weight}")
            missing = sorted(set(range(self._world_size)) - used)
            if missing:
                raise ValueError(f"{where} must have every rank once, rank {missing[0]} is in no edge")

    def get_edge(self, step: int) -> Edge:
        """Returns the edge of this rank in a round."""
        return self._edges[step % len(self._edges)]


class TopologyReg:
    """The topologies that a script may choose by name."""

    registry: ClassVar[dict[str, type[Topology]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[Topology]], type[Topology]]:
        """Returns a class decorator, which raises ValueError for a taken name and for a class that is no Topology."""

        def keep(topology: type[Topology]) -> type[Topology]:
            if name in cls.registry:
                raise ValueError(f"topology {name} is registered already, by {cls.registry[name].__qualname__}")
            if not (isinstance(topology, type) and issubclass(topology, Topology)):
                raise ValueError(f"topology {name} must be a subclass of Topology, got {topology!r}")
            cls.registry[name] = topology
            return topology

        return keep


class _Named(Topology):
    """A topology of decentnode.parallel, as edges."""

    name: str

    def _get_topo_edges(self) -> list[list[Edge]]:
        graph = make_topology(self.name, self._world_size, self._local_world_size)
        return [edges_of(graph, round) for round in range(graph.period or 1)]


@TopologyReg.register("complete")
class CompleteTopology(_Named):
    """All ranks average in every round."""

    name = "complete"


@TopologyReg.register("ring")
class RingTopology(_Named):
    """Pairs of neighbors on a ring, to the right and to the left by turns."""

    name = "ring"


@TopologyReg.register("one-peer-exp")
class OnePeerExpTopology(_Named):
    """Pairs at distances that double from round to round."""

    name = "one-peer-exp"


@TopologyReg.register("alternating-exp-ring")
class AlternatingExpRingTopology(_Named):
    """Pairs of machines average, one half of them in each round, while the others average inside."""

    name = "alternating-exp-ring"


def edges_of(graph: Graph, round: int) -> list[Edge]:
    """Returns the edges of a round of a graph. Raises ValueError if nodes do not form groups of one weight."""
    found, left = [], set(range(graph.num_nodes))
    while left:
        first = min(left)
        group = sorted({first, *graph.sources(first, round)})
        rows = [graph.weights(uid, round) for uid in group]
        weight = rows[0][first]
        share = (1 - weight) / max(1, len(group) - 1)
        for uid, row in zip(group, rows, strict=True):
            expected = dict.fromkeys(group, share) | {uid: weight}
            if row.keys() != expected.keys() or any(abs(row[j] - expected[j]) > 1e-9 for j in group):
                raise ValueError(f"round {round} of {type(graph).__name__} is no list of edges for {graph.num_nodes} "
                                 "ranks: give the graph itself as topology=")  # fmt: skip
        found.append(Edge(group, weight))
        left -= set(group)
    return found


class EdgeGraph(Graph):
    """The graph of a list of edges by round."""

    directed = False

    def __init__(self, rounds: Sequence[Sequence[Edge]], num_nodes: int) -> None:
        """rounds: as `Topology` validates them."""
        self.num_nodes, self.period = num_nodes, len(rounds)
        self._edge_of = [{rank: edge for edge in edges for rank in edge.ranks} for edges in rounds]

    def neighbors(self, uid: int, round: int, members: Collection[int] | None = None) -> tuple[int, ...]:
        others = self._edge_of[round % len(self._edge_of)][uid].ranks
        return tuple(j for j in others if j != uid and (members is None or j in members))

    sources = neighbors

    def weights(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        edge = self._edge_of[round % len(self._edge_of)][uid]
        share = (1 - edge.weight) / max(1, len(edge.ranks) - 1)
        others = self.neighbors(uid, round, members)
        kept = edge.weight if members is None else 1 - share * len(others)
        row = dict.fromkeys(others, share) | {uid: kept}
        return dict(sorted(row.items()))

    out_weights = weights


def graph_for(topology: Any, world_size: int, local_world_size: int) -> Any:
    """Returns what decentnode.parallel accepts as a topology, from a name, a Topology class, an object of one or
    anything that it accepts itself. Raises ValueError for invalid edges, GraphError naming the topologies for a name
    that neither knows."""
    found: Any = TopologyReg.registry.get(topology, topology) if isinstance(topology, str) else topology
    named = isinstance(found, type) and issubclass(found, _Named)
    if named and found._get_topo_edges is _Named._get_topo_edges:
        return found.name
    if isinstance(found, type) and issubclass(found, Topology):
        found = found(local_world_size)
    if isinstance(found, Topology):
        if type(found).get_edge is not Topology.get_edge:
            raise ValueError(f"topology {type(found).__name__} must say its edges in _get_topo_edges, which has those "
                             "of all ranks: get_edge, which has one rank's, is not called")  # fmt: skip
        return EdgeGraph(found._rounds, world_size)
    if isinstance(found, type) and not issubclass(found, Graph):
        raise GraphError(f"topology must be a name or a subclass of Topology, got {found.__qualname__}; "
                         f"names: {', '.join(TopologyReg.registry)}")  # fmt: skip
    return found
