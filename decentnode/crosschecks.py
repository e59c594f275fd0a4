"""What only shows when sections are seen together: one small function per rule, in `CHECKS`.

Each makes the parts it needs, which is cheap (files are opened, labels read, no sample and no socket), and yields a
problem with the places of both values. A part that cannot be made is reported once, by the check of that part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from decentnode.component import load_class
from decentnode.data import DATASETS, shares
from decentnode.data.base import Dataset
from decentnode.errors import UsageError
from decentnode.graph import build as build_graph
from decentnode.graph.base import Graph
from decentnode.mapping.base import Mapping
from decentnode.models import MODELS
from decentnode.problems import Problem, raised
from decentnode.sharing import SHARINGS

if TYPE_CHECKING:
    from decentnode.experiment import Experiment

Check = Callable[["Experiment"], Iterator[Problem]]


def _graph(experiment: Experiment) -> Graph | None:
    with contextlib.suppress(UsageError):
        return experiment.make_graph()
    return None


def _mapping(experiment: Experiment) -> Mapping | None:
    with contextlib.suppress(UsageError):
        return experiment.make_mapping()
    return None


def _dataset(experiment: Experiment) -> Dataset | None:
    with contextlib.suppress(UsageError):
        dataset: Dataset = load_class(experiment.data.name, DATASETS, "data")(experiment.data, experiment.base_dir)
        return dataset
    return None


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


def mapping_can_be_made(experiment: Experiment) -> Iterator[Problem]:
    try:
        experiment.make_mapping()
    except UsageError as error:
        yield raised("mapping", error, type(experiment.mapping).model_fields)


def mapping_holds_the_graph(experiment: Experiment) -> Iterator[Problem]:
    """As many places as nodes."""
    graph, mapping = _graph(experiment), _mapping(experiment)
    if graph is not None and mapping is not None and graph.num_nodes != mapping.num_nodes:
        key = next((k for k in ("nodes", "file") if hasattr(experiment.graph, k)), None)
        message = f"has {graph.num_nodes} nodes but the mapping has places for {mapping.num_nodes}"
        yield Problem(("graph", key) if key else ("graph",), f": the graph {message}", other=("mapping",))


def data_can_be_opened(experiment: Experiment) -> Iterator[Problem]:
    try:
        load_class(experiment.data.name, DATASETS, "data")(experiment.data, experiment.base_dir)
    except UsageError as error:
        yield raised("data", error, type(experiment.data).model_fields)


def every_node_gets_data(experiment: Experiment) -> Iterator[Problem]:
    """The partition fits the number of classes, samples and nodes."""
    graph, dataset = _graph(experiment), _dataset(experiment)
    if graph is None or dataset is None:
        return
    partition = getattr(experiment.data, "partition", None)
    classes = getattr(partition, "classes", None)
    if isinstance(classes, int) and classes > dataset.num_classes:
        message = f"must be at most {dataset.num_classes}, the classes of {experiment.data.name}, got {classes}"
        yield Problem(("data", "partition", "classes"), message, other=("data", "name"))
        return
    try:
        shares(experiment.data, graph.num_nodes, experiment.seed, experiment.base_dir)  # type: ignore[arg-type]
    except UsageError as error:
        yield dataclasses.replace(raised("data.partition", error), other=("graph",))


def model_takes_the_data(experiment: Experiment) -> Iterator[Problem]:
    """Made on the meta device: shapes without memory."""
    dataset = _dataset(experiment)
    if dataset is None:
        return
    try:
        with torch.device("meta"):
            load_class(experiment.model.name, MODELS, "model")(experiment.model).make(
                dataset.input_shape, dataset.num_classes
            )
    except UsageError as error:
        yield dataclasses.replace(raised("model", error, type(experiment.model).model_fields), other=("data",))


def sharing_suits_the_graph(experiment: Experiment) -> Iterator[Problem]:
    rule = load_class(experiment.sharing.name, SHARINGS, "sharing")
    graph = _graph(experiment)
    if graph is None:
        return
    if getattr(rule, "needs_static", False) and graph.period != 1:
        yield Problem(("sharing",), "needs a static graph, got one that changes over the rounds", other=("graph",))
    if getattr(rule, "needs_symmetric", False) and graph.directed:
        yield Problem(("sharing",), "needs an undirected graph, got a directed one", other=("graph",))


def inproc_is_one_machine(experiment: Experiment) -> Iterator[Problem]:
    mapping = _mapping(experiment)
    if experiment.communication.name == "inproc" and mapping is not None and mapping.num_machines > 1:
        message = f": inproc runs in one process, but the mapping has {mapping.num_machines} machines"
        yield Problem(("communication", "name"), message, other=("mapping",))


CHECKS: tuple[Check, ...] = (
    graph_can_be_made,
    mapping_can_be_made,
    mapping_holds_the_graph,
    data_can_be_opened,
    every_node_gets_data,
    model_takes_the_data,
    sharing_suits_the_graph,
    inproc_is_one_machine,
)
