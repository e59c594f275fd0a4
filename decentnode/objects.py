"""Plain Python objects as components: modules, datasets, functions, and classes that no other process could import.

Within a `bound` block, an experiment names such an object as `decentnode.objects:model`, for example. A process that
was not forked from the one that bound the objects gets a UsageError that says what to do instead.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from decentnode.config import component
from decentnode.data.torch_data import InMemorySamples, TorchData, TorchDataConfig, as_lazy, batch
from decentnode.errors import DataError, UsageError
from decentnode.graph.base import Graph
from decentnode.graph.topology import NodesConfig, StaticTopology
from decentnode.models.base import Model, ModelConfig
from decentnode.samples import FACTS, DataSpec, LazySamples

_bound: ContextVar[Mapping[str, type[Any]]] = ContextVar("objects", default={})  # noqa: B039


@contextlib.contextmanager
def bound(objects: Mapping[str, type[Any]]) -> Iterator[None]:
    """Makes these classes available to experiments under their names, in this block and in processes forked in it."""
    token = _bound.set(objects)
    try:
        yield
    finally:
        _bound.reset(token)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    found = _bound.get().get(name)
    if found is None:
        raise UsageError(
            f"{name} was an object of the program that made this experiment and is not available here; to use the "
            "experiment elsewhere, put its class into a module and name it package.module:Class"
        )
    return found


# -- models -------------------------------------------------------------------------------------------------------


class GivenModelConfig(ModelConfig):
    what: str = ""
    """A description of the object. A run can be resumed only with the same description."""


class GivenModel(Model):
    """Copies of a module, or the modules that a function makes."""

    Config: ClassVar[type[component.Config]] = GivenModelConfig
    given: ClassVar[tuple[Any]]
    """The module or the function; in a tuple, because a plain function would become a method of the class."""
    _seen: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()

    def __init__(self, config: component.Config) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        (given,) = type(self).given
        if isinstance(given, nn.Module):
            return copy.deepcopy(given)
        known = data.facts()
        made = given(**{name: known[name] for name in _parameters(given) & FACTS if name in known})
        if not isinstance(made, nn.Module):
            raise UsageError(f"model must be a function that makes a torch.nn.Module, got {type(made).__name__}")
        if made in self._seen:  # the function returns the same module for every node
            return copy.deepcopy(made)
        self._seen.add(made)
        return made


def make_model(given: Any) -> tuple[type[Any], dict[str, Any]]:
    """Returns (the component, the keys of its section) for a module or a function that makes one. Raises UsageError."""
    if isinstance(given, nn.Module):
        what = f"{type(given).__name__} with {sum(p.numel() for p in given.parameters()):,} parameters"
    elif callable(given):
        what = f"what {getattr(given, '__name__', type(given).__name__)} makes"
    else:
        raise UsageError(f"model must be a torch.nn.Module, or a function that makes one, got {type(given).__name__}")
    return type("GivenModel", (GivenModel,), {"given": (given,)}), {"what": what}


# -- data ---------------------------------------------------------------------------------------------------------


class GivenDataConfig(TorchDataConfig):
    what: str = ""
    """A description of the objects. A run can be resumed only with the same description."""


class GivenData(TorchData):
    """Samples that are there already."""

    Config: ClassVar[type[component.Config]] = GivenDataConfig
    splits: ClassVar[Mapping[str, LazySamples]]
    """The samples of "train" and "test"; or of "whole", from which the test samples are split off."""

    def __init__(self, config: GivenDataConfig, base_dir: Path) -> None:  # noqa: ARG002
        self.config = config
        self._made = dict(self.splits)
        self._given: dict[str, Any] = {}
        self._split_argument = None if "whole" in self.splits else "train"
        self._labels: np.ndarray | None = None
        self._first = self._split("train").fetch(np.zeros(1, np.int64))


def make_data(train: Any, test: Any = None) -> tuple[type[Any], dict[str, Any]]:
    """Returns (the component, the keys of its section) for one or two datasets (see `samples_of`). Raises DataError."""
    splits = {"train": samples_of(train, "train"), "test": samples_of(test, "test")} if test is not None else {
        "whole": samples_of(train, "train")}  # fmt: skip
    for name, samples in splits.items():
        if not len(samples):
            raise DataError(f"{'train' if name == 'whole' else name} has no sample")
    counts = " and ".join(f"{len(samples):,} samples" for samples in splits.values())
    made = type("GivenData", (GivenData,), {"splits": splits, "adapted_class": type(train)})
    return made, {"what": f"{type(train).__name__} of {counts}"}


def samples_of(given: Any, where: str) -> LazySamples:
    """Returns samples as `LazySamples`. Raises DataError.

    given: a map-style Dataset, used as it is; an iterable of batches, read to its end; or (inputs, targets) as arrays
    or tensors, also in a TensorDataset.
    """
    tensors = getattr(given, "tensors", None) if isinstance(given, torch.utils.data.TensorDataset) else None
    pair = tensors if tensors is not None else given if isinstance(given, tuple) else ()
    if len(pair) == 2 and all(isinstance(each, np.ndarray | torch.Tensor) for each in pair):
        inputs, targets = (each.detach().cpu().numpy() if isinstance(each, torch.Tensor) else each for each in pair)
        if inputs.shape[:1] != targets.shape[:1] or not inputs.ndim:
            raise DataError(f"{where} must have as many inputs as targets, got shapes {inputs.shape} and "
                            f"{targets.shape}")  # fmt: skip
        return InMemorySamples(batch(inputs, targets, where), given)
    if isinstance(given, type) or not (hasattr(given, "__getitem__") or hasattr(given, "__iter__")):
        kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise DataError(f"{where} must be a Dataset, (inputs, targets) or an iterable of batches, got {kind}")
    return as_lazy(given, where)


# -- losses and optimizers ----------------------------------------------------------------------------------------


def make_loss(given: Any) -> tuple[type[Any], dict[str, Any]]:
    """Returns a class whose instances call the function `given` with outputs and targets, or are copies of the module
    `given`. Raises UsageError."""
    if not callable(given):
        raise UsageError(f"loss must be a function of outputs and targets, got {type(given).__name__}")
    if isinstance(given, nn.Module):

        class GivenModule:
            def __new__(cls) -> Any:
                return copy.deepcopy(given)

        return GivenModule, {}

    class GivenLoss:
        def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
            return given(outputs, targets)

    return GivenLoss, {}


def make_optimizer(given: Any) -> tuple[type[Any], dict[str, Any]]:
    """Returns a class that makes what `given`, a function of parameters, makes. Raises UsageError for an optimizer."""
    if isinstance(given, torch.optim.Optimizer):
        name = type(given).__name__
        raise UsageError(
            f"optimizer must be a class or a function of parameters: the {name} given is bound to the parameters of "
            f"one model; use functools.partial(torch.optim.{name}, lr=...)"
        )
    if not callable(given):
        raise UsageError(f"optimizer must be a function of parameters, got {type(given).__name__}")

    class GivenOptimizer(torch.optim.Optimizer):
        def __new__(cls, params: Any) -> Any:
            made = given(params)
            if not isinstance(made, torch.optim.Optimizer):
                raise UsageError(f"optimizer must make a torch.optim.Optimizer, got {type(made).__name__}")
            return made

    return GivenOptimizer, {}


# -- graphs -------------------------------------------------------------------------------------------------------


class EdgesConfig(NodesConfig):
    edges: list[tuple[int, int]]
    """The undirected edges, each once."""


class Edges(StaticTopology):
    """A graph whose edges are written in the experiment itself."""

    Config: ClassVar[type[component.Config]] = EdgesConfig
    config: EdgesConfig

    def _edges(self) -> Collection[tuple[int, int]]:
        return self.config.edges


def edges_of(graph: Any) -> dict[str, Any]:
    """Returns the section for a networkx graph, whose nodes are numbered in their order unless they are 0..N-1 already.

    Attributes of edges and nodes are ignored. Raises UsageError if the graph is directed or not connected.
    """
    import networkx

    if graph.is_directed():
        raise UsageError("graph must be undirected, got a directed networkx graph")
    if not len(graph) or not networkx.is_connected(graph):
        parts = networkx.number_connected_components(graph)
        raise UsageError(f"graph must be connected, got a networkx graph of {parts} parts")
    nodes = list(graph)
    numbered = set(nodes) == set(range(len(nodes)))
    number = {node: node if numbered else index for index, node in enumerate(nodes)}
    pairs = {(min(number[a], number[b]), max(number[a], number[b])) for a, b in graph.edges() if a != b}
    return {"name": "decentnode.objects:Edges", "nodes": len(nodes), "edges": sorted(map(list, pairs))}


def make_graph(given: Graph) -> tuple[type[Any], dict[str, Any]]:
    """Returns a class that makes exactly this graph, with its weights, and the keys of its section."""

    class GivenGraph:
        Config = component.Config

        def __new__(cls, config: Any, *, weights: Any = None, **_: Any) -> Any:  # noqa: ARG004
            if weights is not None:
                raise UsageError("weights cannot be given together with a graph that has its own; give the graph as "
                                 "a section")
            return given

    return GivenGraph, {}


def _parameters(given: Callable[..., Any]) -> set[str]:
    try:
        return {*inspect.signature(given).parameters}
    except (TypeError, ValueError):
        return set()
