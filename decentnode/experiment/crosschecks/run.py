"""Checks that what is recorded and reported about a run fits its rounds and nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decentnode.config.component import load_class
from decentnode.config.problems import Problem
from decentnode.experiment.crosschecks.parts import graph_of
from decentnode.experiment.tree import Experiment
from decentnode.sharing import SHARINGS
from decentnode.sharing.federated.rounds import Federated


def check_profile(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the round and the node to be profiled exist in the run."""
    profile, graph = experiment.run.profile, graph_of(experiment)
    if profile is None:
        return
    if profile.round >= experiment.node.rounds:
        yield Problem(("run", "profile", "round"), f": the run has rounds 0 to {experiment.node.rounds - 1}, "
                      f"got {profile.round}", other=("node", "rounds"))  # fmt: skip
    if graph is not None and profile.uid >= graph.num_nodes:
        yield Problem(("run", "profile", "uid"), f": the run has nodes 0 to {graph.num_nodes - 1}, got {profile.uid}",
                      other=("graph",))  # fmt: skip


def check_trackers(experiment: Experiment) -> Iterator[Problem]:
    """Checks that there is at most one tracker of each kind, because their files are named after the kind."""
    names = [each.name for each in experiment.run.trackers]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(("run", "trackers", index), f": {name} is listed already; list each tracker once",
                          other=("run", "trackers", names.index(name)))  # fmt: skip


def check_virtual_time(experiment: Experiment) -> Iterator[Problem]:
    """Checks that virtual time can be computed (simulate.compute, simulate.links).

    It assumes rounds that begin with the local steps and that wait for all neighbors.
    """
    rule: Any = load_class(experiment.sharing.name, SHARINGS, "sharing")
    serves = isinstance(rule, type) and issubclass(rule, Federated)
    for key in ("compute", "links"):
        if getattr(experiment.simulate, key) is None:
            continue
        if serves and experiment.node.missing == "return_weight":
            yield Problem(("simulate", key), ": virtual seconds are not known of rounds that go on without late "
                          "clients; leave it out, or use missing: fail", other=("node", "missing"))  # fmt: skip
        if experiment.node.quorum is not None:
            yield Problem(("simulate", key), ": virtual seconds are not known of rounds that go on with a quorum; "
                          "leave it out", other=("node", "quorum"))  # fmt: skip
