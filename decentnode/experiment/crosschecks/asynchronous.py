"""Checks of asynchronous schedules, whose nodes do not wait for each other's rounds: nothing else may rely on
rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decentnode.config.component import load_class
from decentnode.config.problems import Problem
from decentnode.experiment.crosschecks.parts import MAX_CHECKED_NODES, graph_of, mapping_of
from decentnode.experiment.tree import Experiment
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.sharing import SHARINGS

KEYS_OF_SCHEDULE = {
    "gossip_async": ("max_age", "stale", "wait_seconds", "age_weights", "advance_copies"),
    "ad_psgd": ("patience",),
    "epidemic": ("arrivals", "deadline_seconds"),
}
"""Which schedule uses which keys of `node.asynchronous`."""
WAIT_KEYS = ("wait_seconds", "deadline_seconds")
"""The keys that limit how long a node waits in a round."""
MAX_EXAMINED_ROUNDS = 8
"""How many rounds of a changing graph are examined."""
COPY_KEYS = ("stale", "wait_seconds", "advance_copies")
"""The keys that apply to the newest models of neighbors, and not to running sums."""
REFUSED_KEYS = {
    ("early_stop",): "all nodes must end after the same round",
    ("checkpoint", "best"): "the best checkpoint is chosen by an evaluation of all nodes",
}
"""Keys of `node` that asynchronous schedules refuse, and why."""


def check_asynchronous_schedule(experiment: Experiment) -> Iterator[Problem]:
    """Yields problems for everything that needs all nodes in one round, if the schedule is asynchronous."""
    node, sharing = experiment.node, experiment.sharing
    name = node.schedule
    if not SCHEDULES[name].asynchronous:
        return
    if not vars(load_class(sharing.name, SHARINGS, "sharing")).get("ASYNCHRONOUS", False):
        suitable = "full or push_sum" if name == "gossip_async" else "full"
        yield Problem(("node", "schedule"), f": {sharing.name} needs its neighbors' payloads of the same round, got "
                                            f"{name}, in which nodes are in different rounds; use sharing: "
                                            f"{suitable}, or schedule: sequential",
                      other=("sharing",))  # fmt: skip
    elif getattr(sharing, "compression", None) is not None and sharing.name == "push_sum":
        yield Problem(("sharing", "compression"), f": running sums must arrive unchanged, got a codec with {name}; "
                                                  "leave it out", other=("node", "schedule"))  # fmt: skip
    if name == "ad_psgd":
        yield from _check_ad_psgd(experiment)
    if experiment.parameters is not None:
        yield Problem(("parameters",), f": {name} exchanges the whole model; leave the section out, or use "
                      "schedule: sequential", other=("node", "schedule"))  # fmt: skip
    for path, why in REFUSED_KEYS.items():
        section: Any = node
        for key in path:
            section = getattr(section, key, None)
        if section:
            yield Problem(("node", *path), f": {why}, got {name}, in which nodes are in different rounds; leave it out",
                          other=("node", "schedule"))  # fmt: skip
    yield from _check_transport(experiment)


def check_asynchronous_keys(experiment: Experiment) -> Iterator[Problem]:
    """Yields problems for keys of `node.asynchronous` that are not at their defaults and that the schedule ignores."""
    node, schedule = experiment.node, ("node", "schedule")
    if node.asynchronous is None:
        return
    fields = type(node.asynchronous).model_fields
    changed = [key for key, value in node.asynchronous if value != fields[key].get_default()]
    for key in changed:
        path = "node", "asynchronous", key
        reader = next(name for name, keys in KEYS_OF_SCHEDULE.items() if key in keys)
        if reader != node.schedule:
            yield Problem(path, f"is used only with schedule: {reader}, got {node.schedule}; leave it out",
                          other=schedule)  # fmt: skip
        elif experiment.sharing.name == "push_sum" and key in COPY_KEYS:
            yield Problem(path, ": running sums of push_sum are added whatever their round; leave it out",
                          other=("sharing",))  # fmt: skip
        elif key == "wait_seconds" and node.asynchronous.stale != "wait":
            yield Problem(path, f"is used only with stale: wait, got {node.asynchronous.stale}; leave it out, or "
                          "write stale: wait", other=("node", "asynchronous", "stale"))  # fmt: skip
        elif key in WAIT_KEYS:
            yield from _check_wait_limit(experiment, key)
        elif key == "arrivals":
            yield from _check_arrivals(experiment)


def _check_wait_limit(experiment: Experiment, key: str) -> Iterator[Problem]:
    """Yields a problem if a node may wait so long that nodes that need it for an evaluation, or at the end of the run,
    give up on it."""
    seconds, longest = getattr(experiment.node.asynchronous, key), experiment.communication.timeout_seconds
    if seconds >= longest:
        yield Problem(("node", "asynchronous", key), f"must be less than communication.timeout_seconds, {longest:g}, "
                      f"got {seconds:g}: the others give up on a node that waits that long",
                      other=("communication", "timeout_seconds"))  # fmt: skip


def _check_arrivals(experiment: Experiment) -> Iterator[Problem]:
    """Warns if a node waits for more payloads than it can receive, so that every round lasts until its deadline."""
    node, graph = experiment.node, graph_of(experiment)
    if graph is None or graph.num_nodes > MAX_CHECKED_NODES or node.sampler is not None or node.asynchronous is None:
        return
    rounds = range(min(graph.period or MAX_EXAMINED_ROUNDS, MAX_EXAMINED_ROUNDS))
    most = max(len(graph.sources(uid, r)) for uid in range(graph.num_nodes) for r in rounds)
    enough = node.asynchronous.arrivals or 0
    if enough > most:
        message = f"is more than a node receives in a round of the graph, {most}, got {enough}: every round lasts " \
                  "until " \
                  "its deadline"  # fmt: skip
        yield Problem(("node", "asynchronous", "arrivals"), message, is_warning=True, other=("graph",))


def check_weights_are_used(experiment: Experiment) -> Iterator[Problem]:
    """Warns about weights that neither the schedule nor the rule uses; they may come from an extended file."""
    takes = {"epidemic": "the plain mean of the received models", "ad_psgd": "the mean of two models"}
    serves = bool(experiment.servers())
    name = experiment.sharing.name if serves else experiment.node.schedule
    what = "the mean of the clients' changes" if serves else takes.get(name)
    if experiment.weights is not None and what is not None:
        yield Problem(("weights",), f": {name} takes {what} and ignores weights; leave the section out, or write "
                                    "weights: null",
                                    other=("sharing",) if serves else ("node", "schedule"),
                                    is_warning=True)  # fmt: skip


def _check_ad_psgd(experiment: Experiment) -> Iterator[Problem]:
    """Checks ad_psgd: two nodes average their unmodified models, and either may start the exchange in any round."""
    sharing, graph = experiment.sharing, graph_of(experiment)
    if sharing.name == "push_sum" or getattr(sharing, "compression", None) is not None:
        what = "push_sum" if sharing.name == "push_sum" else "a codec"
        yield Problem(("sharing",), f": two nodes of ad_psgd average their plain models, got {what}; "
                      "use sharing: full without compression", other=("node", "schedule"))  # fmt: skip
    if graph is not None and (graph.directed or graph.period != 1):
        what = "a directed one" if graph.directed else "one that changes over the rounds"
        yield Problem(("graph",), f": ad_psgd needs an undirected graph with the same edges in all rounds, got {what}; "
                      "use {name: ring} or {name: regular}", other=("node", "schedule"))  # fmt: skip


def _check_transport(experiment: Experiment) -> Iterator[Problem]:
    """Yields a problem if the transport cannot accept unexpected payloads."""
    config, mapping = experiment.communication, mapping_of(experiment)
    several = mapping is not None and mapping.num_nodes > 1
    has_cliques = several and bool(config.name == "collective" or getattr(config, "cliques", None))
    if config.has_mailboxes and not has_cliques:
        return
    why = "cliques of torch.distributed match payloads by their rounds" if has_cliques else \
        f"{config.name} does not accept unexpected payloads"  # fmt: skip
    key = "cliques" if getattr(config, "cliques", None) else "name"
    yield Problem(("communication", key), f": {why}, got schedule {experiment.node.schedule}; use auto, zeromq, "
                  "shared_memory or inproc", other=("node", "schedule"))  # fmt: skip
