"""Checks of the schedule `epidemic`, in which nodes expect no particular payload, and of peer samplers."""

from __future__ import annotations

from collections.abc import Iterator

from decentnode.config.component import load_class
from decentnode.config.problems import Problem
from decentnode.errors import UsageError
from decentnode.experiment.crosschecks.parts import graph_of
from decentnode.experiment.tree import Experiment
from decentnode.samplers import SAMPLERS
from decentnode.samplers.base import Sampler


def check_epidemic_rule(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the rule's payloads can be averaged: schedule epidemic takes the plain mean, unlike push-sum."""
    if experiment.node.schedule == "epidemic" and experiment.sharing.name == "push_sum":
        message = (": epidemic takes the plain mean of received models, but push_sum sends shares of models; use "
                   "schedule: gossip_async, or sharing: full")  # fmt: skip
        yield Problem(("node", "schedule"), message, other=("sharing",))


def check_sampler(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the sampler is a Sampler, that every node initially knows another node, and that the data has labels
    if nodes are compared by them."""
    config, graph = experiment.node.sampler, graph_of(experiment)
    if config is None:
        return
    kind = load_class(config.name, SAMPLERS, "sampler")
    if not (isinstance(kind, type) and issubclass(kind, Sampler)):
        message = f"must name a class derived from decentnode.samplers.base.Sampler, got {config.name}"
        yield Problem(("node", "sampler"), message)
        return
    if graph is not None and graph.num_nodes > 1:
        alone = next((uid for uid in range(graph.num_nodes) if not graph.neighbors(uid, 0)), None)
        if alone is not None:
            yield Problem(("node", "sampler"), f": node {alone} has no neighbor in the first round of the graph, so "
                                               "initially it knows no other node", other=("graph",))  # fmt: skip
    if kind.tells(config).of == "labels":
        try:
            without = experiment.open_data().spec.num_classes is None
        except UsageError:  # reported by another check
            return
        if without:
            yield Problem(("node", "sampler"), f": {config.name} compares nodes by their labels, but this data has "
                                               "none; use by: model", other=("data",))  # fmt: skip
