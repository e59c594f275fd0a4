"""Servers and their clients: one star, or several stars whose servers are connected by a graph of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.config.component import ADDED, Config, load_class, section
from decentnode.errors import GraphError
from decentnode.graph import AMONG_EQUALS
from decentnode.graph.topology import Lists, NodesConfig, Topology


class StarConfig(NodesConfig):
    server: Annotated[int, ADDED] = Field(0, ge=0)
    """The node to which all others are connected. With `servers`: its place in each group of consecutive uids."""
    servers: Annotated[Annotated[Config, section(AMONG_EQUALS, "graph", implied={"file": "file"})] | None, ADDED] = None
    """With several servers: the graph that connects them; its `nodes` is the number of servers. A server and its
    clients have consecutive uids. Default: one server."""


class Star(Topology):
    """One node, the server, is connected to all others; or several servers are connected to their clients and to other
    servers."""

    Config: ClassVar[type[component.Config]] = StarConfig
    config: StarConfig

    def _set_up(self) -> None:
        self.num_nodes, self._graph = self.config.nodes, self._graph_of_servers()
        count = 1 if self._graph is None else self._graph.num_nodes
        if self.num_nodes % count:
            raise GraphError(f"star needs groups of one size: nodes must be a multiple of {count} servers, "
                             f"got {self.num_nodes}")  # fmt: skip
        size, place = self.num_nodes // count, self.config.server
        if place >= size:
            what = "nodes" if count == 1 else "nodes of a group"
            raise GraphError(f"star: server must be less than {size}, the number of {what}, got {place}")
        self.period = 1 if self._graph is None else self._graph.period
        self._uids = [first + place for first in range(0, self.num_nodes, size)]
        """uids of the servers, indexed by their number in the graph that connects them."""
        self.servers = {
            uid: tuple(each for each in range(uid - place, uid - place + size) if each != uid) for uid in self._uids
        }

    def _graph_of_servers(self) -> Topology | None:
        chosen = self.config.servers
        if chosen is None:
            return None
        made = load_class(chosen.name, AMONG_EQUALS, "graph")(chosen, seed=self.seed, base_dir=self.base_dir)
        assert isinstance(made, Topology)
        if made.directed:
            raise GraphError(f"star: servers need an undirected graph, got {chosen.name}")
        return made

    def _lists(self, phase: int) -> Lists:
        found: list[tuple[int, ...]] = [()] * self.num_nodes
        for number, (uid, clients) in enumerate(self.servers.items()):
            others = () if self._graph is None else self._graph.lists(phase)[number]
            found[uid] = tuple(sorted((*clients, *(self._uids[each] for each in others))))
            for client in clients:
                found[client] = (uid,)
        return found

    def between(self, uid: int, round: int, members: Collection[int] | None = None) -> dict[int, float]:
        if self._graph is None or uid not in self.servers:
            return {uid: 1.0}
        alive = None if members is None else {at for at, server in enumerate(self._uids) if server in members}
        row = self._graph.weights(self._uids.index(uid), round, alive)
        return {self._uids[at]: weight for at, weight in row.items()}
