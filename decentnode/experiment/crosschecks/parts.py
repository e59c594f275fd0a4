"""Components of an experiment for the checks; None if a component cannot be made, which its own check reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from decentnode.config.problems import Problem
from decentnode.errors import UsageError
from decentnode.experiment.initial_model import module_without_values
from decentnode.experiment.tree import Experiment
from decentnode.graph.base import Graph
from decentnode.mapping.base import Mapping
from decentnode.samples import DataSpec

MAX_CHECKED_NODES = 512
"""Mixing matrices of more nodes are not checked, because computing their eigenvalues takes seconds."""

Check = Callable[[Experiment], Iterator[Problem]]


def graph_of(experiment: Experiment) -> Graph | None:
    with contextlib.suppress(UsageError):
        return _with_checked_weights(experiment.make_graph())
    return None


def _with_checked_weights(graph: Graph) -> Graph:
    """Returns the graph after trying to compute its weights. Raises GraphError."""
    graph.weights(0, 0)
    return graph


def mapping_of(experiment: Experiment) -> Mapping | None:
    with contextlib.suppress(UsageError):
        return experiment.make_mapping()
    return None


def spec_of(experiment: Experiment) -> DataSpec | None:
    with contextlib.suppress(UsageError):
        return experiment.open_data().spec
    return None


def has_float_buffers(experiment: Experiment) -> bool:
    """Returns whether the model has statistics (batch normalization); False if it cannot be made, as check_model
    reports."""
    spec = spec_of(experiment)
    with contextlib.suppress(UsageError):
        if spec is not None:
            return any(each.dtype.is_floating_point for each in module_without_values(experiment, spec).buffers())
    return False


def graphs_of(experiment: Experiment) -> list[tuple[int, Graph]]:
    """Returns the graphs that the rule mixes over, with the first fragment that uses each; [] if any cannot be made."""
    try:
        graphs = [_with_checked_weights(graph) for graph in experiment.make_fragment_graphs()]
    except UsageError:
        return []
    if len({graph.num_nodes for graph in graphs}) > 1:
        return []
    found: dict[int, tuple[int, Graph]] = {}
    for index, graph in enumerate(graphs):
        found.setdefault(id(graph), (index, graph))
    return list(found.values())


def fragment_path(experiment: Experiment, index: int) -> tuple[str | int, ...]:
    """Returns the path of the key that determines the graph of a fragment."""
    parameters = experiment.parameters
    if parameters is None or parameters.fragments is None:
        return ("graph",)
    if not isinstance(parameters.fragments, list):
        return ("parameters", "fragments")
    return ("parameters", "fragments", index, "graph") if parameters.fragments[index].graph is not None else ("graph",)
