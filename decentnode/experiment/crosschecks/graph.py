"""Whether graph and mapping can be made, and fit each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from decentnode.config.problems import Problem, raised
from decentnode.errors import UsageError
from decentnode.experiment.crosschecks.parts import fragment_path, graph_of, mapping_of
from decentnode.experiment.tree import Experiment
from decentnode.graph import build as build_graph


def graph_can_be_made(experiment: Experiment) -> Iterator[Problem]:
    """When it can be made without the weights, they are at fault."""
    try:
        experiment.make_graph().weights(0, 0)
    except UsageError as error:
        try:
            build_graph(experiment.graph, None, experiment.seed, experiment.base_dir).weights(0, 0)
        except UsageError:
            yield raised("graph", error, type(experiment.graph).model_fields)
        else:
            keys = type(experiment.weights).model_fields if experiment.weights is not None else ()
            yield dataclasses.replace(raised("weights", error, keys), other=("graph",))


def fragment_graphs_can_be_made(experiment: Experiment) -> Iterator[Problem]:
    """Every fragment's own graph, with as many nodes as the run's."""
    run, parameters = graph_of(experiment), experiment.parameters
    if run is None or parameters is None:
        return
    for index, part in enumerate(parameters.parts(run.num_nodes)):
        if part.graph is None:
            continue
        path = fragment_path(experiment, index)
        try:
            graph = experiment.make_fragment_graph(index, part.graph)
            graph.weights(0, 0)
        except UsageError as error:
            yield Problem(path, f": {error}")
            return  # random fragments have graphs of one kind
        if graph.num_nodes != run.num_nodes:
            message = f": the fragment's graph has {graph.num_nodes} nodes but the run has {run.num_nodes}"
            yield Problem(path, message, other=("graph",))


def mapping_can_be_made(experiment: Experiment) -> Iterator[Problem]:
    try:
        experiment.make_mapping()
    except UsageError as error:
        yield raised("mapping", error, type(experiment.mapping).model_fields)


def mapping_holds_the_graph(experiment: Experiment) -> Iterator[Problem]:
    """As many places as nodes."""
    graph, mapping = graph_of(experiment), mapping_of(experiment)
    if graph is not None and mapping is not None and graph.num_nodes != mapping.num_nodes:
        key = next((k for k in ("nodes", "file") if hasattr(experiment.graph, k)), None)
        message = f"has {graph.num_nodes} nodes but the mapping has places for {mapping.num_nodes}"
        yield Problem(("graph", key) if key else ("graph",), f": the graph {message}", other=("mapping",))
