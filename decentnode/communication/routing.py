"""Assigns a path to every edge by one rule that gives the same answer on both ends without a message."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

PathName = str
"""A name in `PATHS` of communication/__init__.py, "zeromq", or the "package.module:Class" of a custom path."""

BUILT_IN = ("same_process", "shared_memory", "cuda_ipc", "collective")
"""The paths beside zeromq that the rule itself assigns."""


@dataclass(frozen=True)
class Routing:
    """The rule that assigns a path to every edge. The first of these that applies decides:

    - the path that the configuration chooses for the edge
    - ZeroMQ, if injected faults affect messages on the edge
    - memory, between nodes of one process
    - the GPU's memory, between nodes on one GPU
    - shared memory, between CPU nodes of one machine
    - torch.distributed, inside a clique
    - shared memory, between other nodes of one machine
    - ZeroMQ
    """

    machine_of: Mapping[int, int]
    memory: bool = False
    """Whether payloads between nodes of one machine may go through shared memory at all."""
    cliques: tuple[tuple[int, ...], ...] = ()
    """Disjoint sets of nodes that can have a communicator; uids ascending."""
    chosen: Mapping[frozenset[int], PathName] = field(default_factory=dict)
    """Edges for which the configuration chooses the path."""
    gpu: Mapping[int, int] = field(default_factory=dict)
    """Nodes whose models lie on a GPU, with a number that identifies the GPU."""
    together: frozenset[int] = frozenset()
    """The nodes of this process, if it steps several. Nodes of other processes need not know this set: it decides none
    of their edges."""
    has_faults: Callable[[int, int], bool] | None = None
    """Returns whether injected faults affect messages with models between two nodes. Only sockets can inject them."""

    def path(self, a: int, b: int) -> PathName:
        """Returns the path between two nodes. Symmetric."""
        chosen = self.chosen.get(frozenset((a, b)))
        if chosen is not None:
            return chosen
        if self.has_faults is not None and self.has_faults(a, b):
            return "zeromq"
        if a in self.together and b in self.together:
            return "same_process"
        same_machine = self.memory and self.machine_of[a] == self.machine_of[b]
        if same_machine and a in self.gpu and self.gpu[a] == self.gpu.get(b):
            return "cuda_ipc"
        if same_machine and not {a, b} & self.gpu.keys():
            return "shared_memory"
        if b in self.clique_of(a):
            return "collective"
        return "shared_memory" if same_machine else "zeromq"

    def clique_of(self, uid: int) -> tuple[int, ...]:
        """Returns the clique that contains this node, with the node itself; empty if there is none."""
        return self._cliques_by_uid.get(uid, ())

    @functools.cached_property
    def _cliques_by_uid(self) -> dict[int, tuple[int, ...]]:
        return {uid: clique for clique in self.cliques for uid in clique}

    def names(self) -> list[PathName]:
        """Returns the paths beside zeromq that any edge of the run may take, in the same order on every node."""
        chosen = sorted(set(self.chosen.values()) - {*BUILT_IN, "zeromq"})
        return [name for name in (*BUILT_IN, *chosen) if self.used(name)]

    def used(self, path: PathName) -> bool:
        """Returns whether any two nodes of the run would use `path`."""
        if path not in BUILT_IN and path != "zeromq":
            return path in self.chosen.values()
        if path == "same_process":
            return len(self.together) > 1
        if path == "collective":
            return any(self.joined(clique) for clique in self.cliques)
        if path == "cuda_ipc" and not self.gpu:
            return False
        if path == "shared_memory" and not self.chosen and not self.gpu:
            machines = list(self.machine_of.values())
            if not self.memory or len(set(machines)) == len(machines):
                return False
        # ignores `together`: other nodes do not know it, and all nodes have to open the same paths
        ignoring_processes = dataclasses.replace(self, together=frozenset())
        return any(ignoring_processes.path(a, b) == path for a, b in combinations(sorted(self.machine_of), 2))

    def joined(self, clique: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the members of a clique that need its communicator: those with an edge by `collective`."""
        return tuple(a for a in clique if any(b != a and self.path(a, b) == "collective" for b in clique))

    def unknown(self) -> Iterator[str]:
        """Yields one sentence for every configured node that the run does not have."""
        in_cliques = {uid for clique in self.cliques for uid in clique}
        in_edges = {uid for pair in self.chosen for uid in pair}
        for key, named in (("cliques", in_cliques), ("edges", in_edges)):
            for uid in sorted(named - self.machine_of.keys()):
                yield f"{key} must name nodes of the run, got {uid} of {len(self.machine_of)} nodes"

    def problems(self) -> Iterator[str]:
        """Yields one sentence for every contradiction with the mapping or within the configuration, beside those of
        `unknown`."""
        seen: dict[int, tuple[int, ...]] = {}
        for clique in self.cliques:
            for uid in clique:
                if uid in seen:
                    both = f"{list(seen[uid])} and {list(clique)}"
                    yield f"a node must be in at most one clique, got node {uid} in {both}"
                seen[uid] = clique
        for pair, path in self.chosen.items():
            a, b = sorted(pair)
            if not pair <= self.machine_of.keys():
                continue
            if path == "collective" and b not in self.clique_of(a):
                yield f"edges by collective need both nodes in one clique, got {a} and {b}"
            elif path == "shared_memory" and self.machine_of[a] != self.machine_of[b]:
                yield f"edges by shared_memory need both nodes on one machine, got {a} and {b}"
