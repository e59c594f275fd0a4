"""Counts the open files of a machine's processes, which include sockets and events, and compares them with the limit.
Without files libzmq aborts the process, and a node that has too few for a connection waits for it in vain."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from decentnode.build import processes_of
from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.errors import EnvironmentFault
from decentnode.experiment import Experiment
from decentnode.formatting import plural
from decentnode.wire.control_tree import ControlTree

# Measured for one to 32 nodes per process on rings, regular and complete graphs: 2 % too few to 5 % too many.
OF_A_PROCESS, OF_SEVERAL_NODES, OF_A_NODE = 17, 6, 11
OF_A_TREE_LINK, OF_A_NEIGHBOR, OF_SHARED_MEMORY = 8, 6, 3
"""Per link to a node of another process: in the control tree, to a neighbor that is not linked there, and to a neighbor
through shared memory, linked there or not."""
OF_A_SUPERVISOR, OF_A_CHILD = 20, 3
MAX_ROUNDS = 64
"""The rounds of which neighbors are counted, for graphs that change."""


@dataclass(frozen=True)
class OpenFiles:
    """The open files that a run's processes on one machine need."""

    process: int
    """Of the process with the most."""
    nodes: int
    """The number of nodes in that process."""
    supervisor: int
    limit: int
    """The hard limit of this system, which all processes take."""

    @property
    def fit(self) -> bool:
        return max(self.process, self.supervisor) <= self.limit

    def __str__(self) -> str:
        return (f"a process of {plural(self.nodes, 'node')} needs {self.process}, its supervisor {self.supervisor}, "
                f"the limit is {self.limit} (ulimit -Hn)")  # fmt: skip


def count(experiment: Experiment, machine: int, rounds: int = MAX_ROUNDS) -> OpenFiles:
    """Returns the open files that the nodes of `machine` need. rounds: neighbors of at most that many are counted."""
    processes, mapping = processes_of(experiment, machine), experiment.make_mapping()
    graphs = {id(graph): graph for graph in experiment.make_fragment_graphs()}.values()
    met = [(graph, r) for graph in graphs for r in range(min(graph.period or rounds, rounds))]
    shares_memory = experiment.communication.shared_memory is not False and FOLDER.is_dir()
    local = {*mapping.local(machine)}

    def of_process(uids: tuple[int, ...]) -> int:
        found = OF_A_PROCESS + len(uids) * OF_A_NODE + (OF_SEVERAL_NODES if len(uids) > 1 else 0)
        for uid in uids:
            linked = {*ControlTree.of(uid, mapping.num_nodes).links}.difference(uids)
            neighbors = {v for graph, r in met for v in graph.neighbors(uid, r)}.difference(uids)
            found += OF_A_TREE_LINK * len(linked)
            for each in neighbors:
                if shares_memory and each in local:
                    found += OF_SHARED_MEMORY
                elif each not in linked:
                    found += OF_A_NEIGHBOR
        return found

    need, nodes = max((of_process(uids), len(uids)) for uids in processes)
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OpenFiles(need, nodes, OF_A_SUPERVISOR + OF_A_CHILD * len(processes), limit)


def check(experiment: Experiment, machine: int) -> None:
    """Raises EnvironmentFault if the system's limit is too low for the nodes of `machine` in the first round."""
    found = count(experiment, machine, rounds=1)
    if not found.fit:
        raise EnvironmentFault(f"too few open files are allowed: {found}; raise the limit, or run fewer nodes here")
