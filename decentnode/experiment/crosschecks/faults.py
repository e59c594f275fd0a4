"""Checks that the faults of the experiment can be injected into its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.config.problems import Problem
from decentnode.errors import UsageError
from decentnode.experiment.crosschecks.parts import graph_of, mapping_of
from decentnode.experiment.tree import Experiment
from decentnode.faults import Corrupt, Fault, FaultyModelLinks, Kill, NetworkFault, NodeFault, Restart

ON_LINKS, IN_NODE = NetworkFault.__args__, NodeFault.__args__

NODE_KEYS = ("nodes", "sides", "source", "to")
"""The keys of faults that name nodes."""


def check_fault_targets(experiment: Experiment) -> Iterator[Problem]:
    """Checks that faults name nodes that exist, and warns if their round does not exist.

    The latter is only a warning because a trial run may have fewer rounds than the file says.
    """
    graph, rounds = graph_of(experiment), experiment.node.rounds
    for index, fault in enumerate(experiment.faults):
        if fault.at_round is not None and fault.at_round >= rounds:
            message = f"is not below node.rounds, {rounds}, got {fault.at_round}: the fault will never occur"
            yield Problem(("faults", index, "at_round"), message, is_warning=True, other=("node", "rounds"))
        if isinstance(fault, Restart) and (fault.at_round is not None or fault.probability is not None):
            key = "at_round" if fault.at_round is not None else "probability"
            yield Problem(("faults", index, key), ": a node that was killed begins no round; a restart needs "
                          "at_seconds, or every_seconds with until_seconds")  # fmt: skip
        if isinstance(fault, Restart) and (never := _never_killed(experiment.faults, fault)):
            yield Problem(("faults", index, "nodes"), f": no other fault kills node {never}, and only dead nodes are "
                                                      "restarted", is_warning=True)  # fmt: skip
        if graph is None:
            continue
        stop = graph.num_nodes + experiment.node.newcomers
        for path, uid in _named_uids(fault):
            if not 0 <= uid < stop:
                yield Problem(("faults", index, *path), f"must be uids below {stop}, got {uid}",
                              other=("graph",))  # fmt: skip
            elif isinstance(fault, Restart) and uid >= graph.num_nodes:
                yield Problem(("faults", index, *path), f": node {uid} is a newcomer, which only its own command "
                                                        "(decentnode join) can start again",
                                                        other=("node", "newcomers"))  # fmt: skip
        count = getattr(fault, "count", None)
        if count is not None and count > graph.num_nodes:
            yield Problem(("faults", index, "count"), f"must be at most the number of nodes, {graph.num_nodes}, got "
                          f"{count}", other=("graph",))  # fmt: skip


def _never_killed(faults: Sequence[Fault], restart: Restart) -> str:
    """Returns the nodes of a restart that no fault kills, as text; "" if there are none, or any may be killed."""
    killed = [fault for fault in faults if isinstance(fault, Kill)]
    if any(fault.nodes == "all" for fault in killed) or (restart.nodes == "all" and killed):
        return ""
    killed_uids = {uid for fault in killed for uid in fault.uids}
    return ", ".join(map(str, sorted({*restart.uids} - killed_uids))) if killed or restart.nodes != "all" else "any"


def _named_uids(fault: Fault) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yields the path and the value of each uid in a fault."""

    def below(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
        if isinstance(value, tuple):
            for index, each in enumerate(value):
                yield from below(each, (*path, index))
        elif isinstance(value, int):
            yield path, value

    for key in NODE_KEYS:
        yield from below(getattr(fault, key, None), (key,))


def check_fault_plan(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the faults can be made, among others that they are not too many."""
    if graph_of(experiment) is None or any(not each.is_warning for each in check_fault_targets(experiment)):
        return
    try:
        experiment.make_faults()
    except UsageError as error:
        yield Problem(("faults",), f": {error}")


def check_faults_are_possible(experiment: Experiment) -> Iterator[Problem]:
    """Checks that faults have something to act on: processes to kill, or sockets whose messages can be lost."""
    config = experiment.communication
    for index, fault in enumerate(experiment.faults):
        path = "faults", index, "do"
        if not config.networked:
            if not isinstance(fault, IN_NODE):
                message = f": {config.name} has neither processes nor connections for {fault.do} to strike; use " \
                          "auto, zeromq or shared_memory, or decentnode simulate, which simulates both"
                yield Problem(path, message, other=("communication", "name"))
        elif isinstance(fault, ON_LINKS):
            yield from _check_link_fault(experiment, path, fault)
            if isinstance(fault, Corrupt) and getattr(config, "checksum", "auto") == "none":
                message = ": without checksums, corrupted messages are not detected; leave communication.checksum out"
                yield Problem(path, message, other=("communication", "checksum"))
        elif isinstance(fault, Kill) and experiment.node.missing == "return_weight":
            message = ": a node that never comes back ends the run at the next evaluation, which needs all nodes; " \
                      "with missing: regroup, the others continue without it"  # fmt: skip
            yield Problem(path, message, is_warning=True, other=("node", "missing"))
        elif isinstance(fault, Restart) and experiment.node.missing != "regroup":
            message = f": a restarted node can rejoin only with missing: regroup, got {experiment.node.missing}"
            yield Problem(path, message, other=("node", "missing"))


def _check_link_fault(experiment: Experiment, path: tuple[str | int, ...], fault: NetworkFault) -> Iterator[Problem]:
    """Checks that models that a link fault acts on do go through sockets, and not through another path."""
    config, mapping = experiment.communication, mapping_of(experiment)
    if mapping is None or not isinstance(config, ZeroMQConfig):
        return
    nodes, affects_models = range(mapping.num_nodes), FaultyModelLinks([fault])
    routing = config.routing({uid: mapping.place(uid).machine for uid in nodes})
    asked = {pair: path for pair, path in routing.chosen.items() if path != "zeromq"}
    asked |= {frozenset(pair): "collective" for clique in routing.cliques for pair in combinations(clique, 2)
              if frozenset(pair) not in routing.chosen}  # fmt: skip
    if config.shared_memory:
        asked |= {frozenset(pair): "shared_memory" for pair in combinations(nodes, 2)
                  if routing.machine_of[pair[0]] == routing.machine_of[pair[1]]}  # fmt: skip
    other = next((path for pair, path in asked.items() if affects_models(*pair)), None)
    if other is not None:
        message = f": {fault.do} acts on messages that go through sockets, but here models go through {other}; use " \
                  f"communication: {{name: auto}}{', or plane: control' * hasattr(fault, 'plane')}"
        yield Problem(path, message, other=("communication",))
