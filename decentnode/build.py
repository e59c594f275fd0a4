"""From an experiment to the node of one uid: the one place where all rooms meet."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from decentnode import rng
from decentnode.communication.base import Communication
from decentnode.communication.inproc import Hub, Inproc, InprocConfig
from decentnode.communication.parts import Schema
from decentnode.config.component import load_class
from decentnode.errors import EnvironmentFault
from decentnode.experiment import Experiment
from decentnode.mapping.base import Mapping
from decentnode.models import MODELS
from decentnode.node.node import Node, NodeParts, Record
from decentnode.payload import TensorSpec
from decentnode.samples import DataSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.tensors import FlatModel
from decentnode.training import TRAININGS

MakeCommunication = Callable[[tuple[Schema, ...]], Communication]


def threads_of(experiment: Experiment, uid: int) -> int:
    """Threads of a node: what the mapping says, or its part of this machine's cores."""
    mapping = experiment.make_mapping()
    place = mapping.place(uid)
    if place.threads is not None:
        return place.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // len(mapping.local(place.machine)))


def device_of(wanted: str, rank: int = 0) -> torch.device:
    """The torch device behind auto, cpu, cuda or cuda:N for the rank-th node of a machine; a GPU with its number.

    Raises EnvironmentFault when it is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" or (wanted == "cuda" and count):
        return torch.device("cuda", rank % count) if count else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise EnvironmentFault(f"mapping.device must be auto, cpu, cuda or cuda:N, got {wanted!r}") from error
    if device.type == "cuda" and (device.index or 0) >= count:
        here = f"only {count} GPUs are" if count else "no GPU is"
        raise EnvironmentFault(f"mapping.device is {wanted}, but {here} usable here; use auto or cpu")
    return device


def make_model(experiment: Experiment, data: DataSpec) -> torch.nn.Module:
    """The initial model: the same on every node. Torch's global generator is left as it was."""
    maker = load_class(experiment.model.name, MODELS, "model")(experiment.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.torch_seed(experiment.seed, rng.GLOBAL, "initial model"))
        module: torch.nn.Module = maker.make(data)
    return module


def machines_of(mapping: Mapping) -> list[tuple[int, ...]]:
    """The uids on every machine, ascending."""
    return [mapping.local(machine) for machine in range(mapping.num_machines)]


def schemas_of(sharing: Sharing, model: FlatModel) -> tuple[Schema, ...]:
    """What every phase of a round exchanges: the rule's own, then float buffers where the model has any."""
    tensors = sharing.payload_schema(model.num_parameters, model.dtype)
    schemas = [Schema(model.num_parameters, tensors, sharing.requirements.elementwise)] * sharing.requirements.phases
    if model.buffers.numel():
        count = model.buffers.numel()
        schemas.append(Schema(count, {"x": TensorSpec(model.buffers.dtype, count)}, True))
    return tuple(schemas)


def build(
    experiment: Experiment, uid: int, make_communication: MakeCommunication, record: Record = lambda _: None,
    device: str | None = None,
) -> Node:
    """The node `uid` with its own share of the data, ready to start. Raises what its parts raise.

    device: overrides the mapping's.
    """
    graph, mapping = experiment.make_graph(), experiment.make_mapping()
    place = device_of(device or mapping.place(uid).device, mapping.place(uid).rank)
    data = experiment.open_data()
    module = make_model(experiment, data.spec).to(place)
    model = FlatModel(module)
    training: Any = load_class(experiment.training.name, TRAININGS, "training")(
        experiment.training, model, experiment.make_task(), data.of(uid), seed=experiment.seed, uid=uid
    )

    def make_rule() -> Sharing:
        sharing = make_sharing(experiment.sharing, machines_of(mapping))
        sharing.set_parameter_shapes(model.shapes)
        return sharing

    sharing = make_rule()
    communication = make_communication(schemas_of(sharing, model))
    if not sharing.requirements.overrides_topology:
        communication.partners = graph.partners(uid)
    node_parts = NodeParts(graph, training, sharing, communication, make_rule)
    return Node(uid, experiment.node, node_parts, seed=experiment.seed, record=record)


def build_in_process(
    experiment: Experiment, record: Callable[[int, dict[str, Any]], None] = lambda _uid, _record: None
) -> list[Node]:
    """All nodes of a run in this process, sharing one hub."""
    hub = Hub(experiment.make_graph().num_nodes)
    config = experiment.communication
    if not isinstance(config, InprocConfig):
        config = InprocConfig.model_validate({"name": "inproc"})
    return [
        build(
            experiment, uid,
            lambda schemas, uid=uid: Inproc(config, uid=uid, hub=hub, schemas=schemas),  # type: ignore[misc]
            lambda record_, uid=uid: record(uid, record_),  # type: ignore[misc]
        )
        for uid in range(hub.num_nodes)
    ]


def step_all(nodes: list[Node], rounds: int | None = None) -> None:
    """Run nodes of one process to their end, each one yield at a time in uid order.

    rounds: stop all after so many rounds.
    """
    runs = [node.steps() for node in nodes]
    while runs:
        if rounds is not None and nodes[0].round >= rounds:
            nodes[0].ask_stop()
        runs = [run for run in runs if next(run, _END) is not _END]


_END = object()
