"""Checks that the transport supports what the mapping and the section `node` ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from decentnode.communication import PATHS
from decentnode.communication.path import Path as TransportPath
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.config.component import load_class
from decentnode.config.problems import Problem
from decentnode.errors import UsageError
from decentnode.experiment.crosschecks.parts import graph_of, mapping_of
from decentnode.experiment.tree import Experiment
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.sharing import SHARINGS
from decentnode.sharing.requirements import Requirements
from decentnode.wire.membership.watch import Watch


def check_inproc(experiment: Experiment) -> Iterator[Problem]:
    mapping = mapping_of(experiment)
    if experiment.communication.name == "inproc" and mapping is not None and mapping.num_machines > 1:
        message = f": inproc runs in one process, but the mapping has {mapping.num_machines} machines"
        yield Problem(("communication", "name"), message, other=("mapping",))


def check_nodes_per_process(experiment: Experiment) -> Iterator[Problem]:
    """Checks that nodes share a process (mapping.nodes_per_process) only if one thread can step their transports."""
    asked, config = getattr(experiment.mapping, "nodes_per_process", 1), experiment.communication
    if asked not in (1, "auto") and config.networked and not config.steps_nodes:
        message = f": {asked} nodes cannot share a process in cliques of torch.distributed, where each node blocks " \
                  "its process: leave it out, or the cliques"  # fmt: skip
        yield Problem(("mapping", "nodes_per_process"), message, other=("communication",))


def check_edges_and_cliques(experiment: Experiment) -> Iterator[Problem]:
    """Checks that cliques and edges of the transport name nodes of the mapping, on suitable machines."""
    mapping, config = mapping_of(experiment), experiment.communication
    if mapping is None or not isinstance(config, ZeroMQConfig):
        return
    routing = config.routing({uid: mapping.place(uid).machine for uid in range(mapping.num_nodes)})
    for problem in routing.problems():
        key, _, rest = problem.partition(" ")
        named = key in ("cliques", "edges")
        yield Problem(("communication", key if named else "cliques"), rest if named else f": {problem}",
                      other=("mapping",))  # fmt: skip
    for name in sorted(set(routing.chosen.values()) - {*PATHS, "zeromq"}):
        try:
            found = load_class(name, PATHS, "path")
            if not (isinstance(found, type) and issubclass(found, TransportPath)):
                raise UsageError(f"{name} must be a class derived from decentnode.communication.path.Path")
        except UsageError as error:
            yield Problem(("communication", "edges"), f": {error}")


def check_nat(experiment: Experiment) -> Iterator[Problem]:
    """Checks that nodes behind NAT (mapping.behind_nat) use only ZeroMQ between machines.

    Relays are ZeroMQ's; communicators of torch.distributed cannot connect through them.
    """
    mapping, config = mapping_of(experiment), experiment.communication
    if mapping is None:
        return
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    hidden = {place.uid for place in places if place.behind_nat}
    if not hidden or not isinstance(config, ZeroMQConfig):
        return
    machine_of = {place.uid: place.machine for place in places}
    routing = config.routing(machine_of)
    for uid in sorted(hidden):
        other = next((each for each in machine_of if machine_of[each] != machine_of[uid]
                      and routing.path(uid, each) != "zeromq"), None)  # fmt: skip
        if other is not None:
            message = f": nodes {uid} and {other} would use {routing.path(uid, other)}, but no node can connect to " \
                      f"node {uid}, which is behind NAT: only zeromq can send through relays"  # fmt: skip
            yield Problem(("communication",), message, other=("mapping",))
            return


def check_key_files(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the folder of keys and the file of invitations exist; with several machines, this is only a warning,
    because the files may be only on another machine."""
    config, mapping = experiment.communication, mapping_of(experiment)
    invitations: Path | None = getattr(config, "invitations", None)
    for key, path, maker in (("keys", config.key_folder, "keygen"), ("invitations", invitations, "invite")):
        if path is not None and mapping is not None and not (place := experiment.base_dir / path).exists():
            elsewhere = mapping.num_machines > 1
            yield Problem(("communication", key), f": {place} does not exist{' on this machine' * elsewhere}; "
                          f"decentnode {maker} creates it", is_warning=elsewhere)  # fmt: skip
    if getattr(config, "bulk_security", "") == "aes-gcm" and config.key_folder is None:
        yield Problem(("communication", "bulk_security"), ": aes-gcm needs keys, got none; set communication.keys to "
                                                          "the folder that decentnode keygen makes", is_warning=True)


def check_timeouts(experiment: Experiment) -> Iterator[Problem]:
    """Checks that each time-out is longer than those of the steps that it includes: a ping, a silent node, a round, all
    nodes. (The start of a generation allows for the longest round by itself; see `GenerationWait`.)"""
    config, quorum = experiment.communication, experiment.node.quorum
    if quorum is not None and quorum.grace_seconds >= config.timeout_seconds:
        yield Problem(("node", "quorum", "grace_seconds"), f"must be less than communication.timeout_seconds, "
                      f"{config.timeout_seconds:g}, got {quorum.grace_seconds:g}: a round waits no longer than that, "
                      "with or without a quorum", other=("communication", "timeout_seconds"))  # fmt: skip
    if config.networked and config.start_timeout_seconds < config.timeout_seconds:
        yield Problem(("communication", "start_timeout_seconds"), f"is less than timeout_seconds, "
                      f"{config.timeout_seconds:g}, got {config.start_timeout_seconds:g}: the start would give up on "
                      "nodes for which a round would still wait; leave it out to use timeout_seconds", is_warning=True,
                      other=("communication", "timeout_seconds"))  # fmt: skip
    if experiment.node.missing != "regroup" or not config.networked:
        return
    beat = Watch.AFTER_SECONDS + Watch.EVERY_SECONDS
    silence, rounds = config.suspect_seconds, config.timeout_seconds
    if silence < beat:
        message = f"must be at least {beat:g}, got {silence:g}: a node that others wait for is pinged after " \
                  f"{Watch.AFTER_SECONDS:g} s and then every {Watch.EVERY_SECONDS:g} s"  # fmt: skip
        yield Problem(("communication", "suspect_seconds"), message)
    if silence >= rounds:
        yield Problem(("communication", "suspect_seconds"), f"must be less than timeout_seconds, {rounds:g}, got "
                      f"{silence:g}: a round would give up on a node before it counts as silent",
                      other=("communication", "timeout_seconds"))  # fmt: skip


def check_generations(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the run can have generations (node.missing: regroup): the transport supports them, min_nodes is at
    most the number of nodes, and the rule and the other sections suit `repair` and `on_partition`. Without generations,
    checks that no key of `node` needs them."""
    node, graph, config = experiment.node, graph_of(experiment), experiment.communication
    if node.missing != "regroup":
        keys = {"restarts": node.restarts, "min_nodes": node.min_nodes is not None, "orphans": node.orphans != "lost",
                "newcomers": node.newcomers, "repair": node.repair != "none",
                "on_partition": node.on_partition != "majority", "merge_weights": node.merge_weights != "samples"}
        for key in [key for key, given in keys.items() if given][:1]:
            both = " and on_partition: both" if key == "merge_weights" else ""
            yield Problem(("node", key), f"needs missing: regroup{both}, got {node.missing}",
                          other=("node", "missing"))  # fmt: skip
        return
    yield from _check_repair(experiment)
    yield from _check_on_partition(experiment)
    if not config.has_generations:
        yield Problem(("node", "missing"), f": {config.name} does not support generations of members; use auto, "
                                           "zeromq, shared_memory or collective",
                                           other=("communication", "name"))  # fmt: skip
    if graph is not None and node.min_nodes is not None and node.min_nodes > graph.num_nodes:
        yield Problem(("node", "min_nodes"), f"must be at most the number of nodes, {graph.num_nodes}, "
                      f"got {node.min_nodes}", other=("graph",))  # fmt: skip


def _check_repair(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the sharing rule accepts edges that the graph does not have, if node.repair adds some."""
    node, sharing = experiment.node, experiment.sharing
    if node.repair == "none":
        return
    needs = getattr(load_class(sharing.name, SHARINGS, "sharing"), "requirements", Requirements())
    reasons = {
        "has servers, and no round can begin without them": needs.star,
        "has neighbors of its own": needs.overrides_topology,
        "needs a graph that treats all nodes of a group alike": needs.groups,
        "needs a tree, and a ring of parts is not a tree; use random": needs.tree and node.repair == "ring",
    }
    for reason in [reason for reason, found in reasons.items() if found][:1]:
        yield Problem(("node", "repair"), f": {sharing.name} {reason}, got {node.repair}", other=("sharing",))
    if node.sampler is not None:
        yield Problem(("node", "repair"), ": the sampler, not the graph, chooses where a node sends, got "
                      f"{node.repair}", other=("node", "sampler"))  # fmt: skip


def _check_on_partition(experiment: Experiment) -> Iterator[Problem]:
    """Checks that nothing is tied to one side of a partitioned network, if both sides continue (on_partition: both)."""
    node, sharing, config = experiment.node, experiment.sharing, experiment.communication
    if node.on_partition == "majority":
        if node.merge_weights != "samples":
            yield Problem(("node", "merge_weights"), "needs on_partition: both, got majority: at most one side of a "
                                                     "partition continues, so nothing is merged",
                                                     other=("node", "on_partition"))  # fmt: skip
        return
    needs = getattr(load_class(sharing.name, SHARINGS, "sharing"), "requirements", Requirements())
    reasons: dict[tuple[str, ...], tuple[bool, str]] = {
        ("node", "min_nodes"): (node.min_nodes is not None, "each side continues, however small"),
        ("node", "orphans"): (node.orphans != "lost", "both sides would adopt each other's samples, so both would "
                                                      "train on all samples"),
        ("node", "newcomers"): (bool(node.newcomers), "both sides would give one uid to two newcomers"),
        ("node", "checkpoint"): (node.checkpoint is not None, "a checkpoint is of one round of all nodes, but each "
                                                              "side would write its own"),
        ("node", "schedule"): (SCHEDULES[node.schedule].asynchronous, "the first side to finish all rounds would end "
                                                                      "the run"),
        ("sharing",): (needs.star, "a side without the servers cannot train"),
        ("communication", "name"): (config.name == "collective", "a group of torch.distributed needs one node as its "
                                                                 "meeting point, which is on one side only"),
    }  # fmt: skip
    for path, (found, reason) in reasons.items():
        if found:
            yield Problem(path, f": {reason}, got on_partition: both", other=("node", "on_partition"))
