"""Whether what is asked of the records of a run fits its rounds and nodes."""

from __future__ import annotations

from collections.abc import Iterator

from decentnode.config.problems import Problem
from decentnode.experiment.crosschecks.parts import graph_of
from decentnode.experiment.tree import Experiment


def profile_is_of_the_run(experiment: Experiment) -> Iterator[Problem]:
    """The round that is profiled is one of the run, and so is the node."""
    profile, graph = experiment.run.profile, graph_of(experiment)
    if profile is None:
        return
    if profile.round >= experiment.node.rounds:
        yield Problem(("run", "profile", "round"), f": the run has rounds 0 to {experiment.node.rounds - 1}, "
                      f"got {profile.round}", other=("node", "rounds"))  # fmt: skip
    if graph is not None and profile.uid >= graph.num_nodes:
        yield Problem(("run", "profile", "uid"), f": the run has nodes 0 to {graph.num_nodes - 1}, got {profile.uid}",
                      other=("graph",))  # fmt: skip
