"""From an experiment to the node of one uid: the one place where all rooms meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decentnode.communication.base import Communication
from decentnode.communication.inproc import Hub, Inproc, InprocConfig
from decentnode.communication.parts import Schema
from decentnode.config.component import load_class
from decentnode.errors import DataError, EnvironmentFault, UsageError
from decentnode.experiment import Experiment
from decentnode.experiment.initial_model import make_model, module_without_values
from decentnode.graph.base import Graph
from decentnode.mapping.base import Mapping, checked_device
from decentnode.models.recurrent import expect_copies
from decentnode.node.node import Node, NodeParts
from decentnode.node.rounds import Record
from decentnode.node.rules import Rules
from decentnode.node.sampling import Sampling, Sketch, schema_of
from decentnode.node.schedules.schedules import payload_schema, schemas_in
from decentnode.payload import TensorSpec
from decentnode.samplers import SAMPLERS
from decentnode.samplers.base import Sampler, Surroundings
from decentnode.samples import DataSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.parameters import layout_of, named
from decentnode.sharing.weighed import Weighed
from decentnode.tensors import FlatModel
from decentnode.training import TRAININGS
from decentnode.wire.generation import Limits

MakeCommunication = Callable[[tuple[Schema, ...]], Communication]


NODES_PER_CORE = 4
"""`mapping.nodes_per_process: auto`: with more nodes per core than this a machine has a process per core."""
SMALL_MODEL_BYTES = 16 << 20
"""And with no larger model than this: those that are larger spend their time in computing, and each node then has the
memory of its process to itself."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_of(experiment: Experiment, machine: int) -> list[tuple[int, ...]]:
    """The nodes of one machine by the process that runs them, ascending: as `mapping.nodes_per_process` says."""
    local = experiment.make_mapping().local(machine)
    asked = getattr(experiment.mapping, "nodes_per_process", 1)
    each = _nodes_per_process(experiment, local) if asked == "auto" else asked
    return [local[first : first + each] for first in range(0, len(local), each)]


def _nodes_per_process(experiment: Experiment, local: Sequence[int]) -> int:
    """What `auto` is on this machine."""
    mapping, cores = experiment.make_mapping(), _cores()
    if len(local) <= NODES_PER_CORE * cores or not experiment.communication.steps_nodes:
        return 1
    if any(device.type != "cpu" for device in devices_of(mapping, local)):
        return 1
    module = module_without_values(experiment, experiment.open_data().spec)
    size = sum(each.numel() * each.element_size() for each in module.parameters())
    return -(-len(local) // cores) if size <= SMALL_MODEL_BYTES else 1


def threads_of(experiment: Experiment, uid: int) -> int:
    """Threads of a node's process: what the mapping says, or its part of this machine's cores."""
    mapping = experiment.make_mapping()
    place = mapping.place(uid)
    if place.threads is not None:
        return place.threads
    return max(1, _cores() // len(processes_of(experiment, place.machine)))


def device_of(wanted: str, rank: int = 0, key: str = "mapping.device") -> torch.device:
    """The torch device behind auto, cpu, cuda or cuda:N for the rank-th node of a machine; a GPU with its number.

    key: what named it, for errors. Raises UsageError for another word, EnvironmentFault when the device is not there.
    """
    try:
        checked_device(wanted)
    except ValueError as error:
        raise UsageError(f"{key} {error}") from None
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda._is_in_bad_fork() and torch.cuda.device_count():
        raise EnvironmentFault(
            f"{key} is {wanted}, but this process has already asked for its GPUs (torch.cuda.is_available() is "
            "enough), so its forks cannot use them: give processes=False or device: cpu, or start the program with "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 in its environment"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto" or (wanted == "cuda" and count):
        return torch.device("cuda", rank % count) if count else torch.device("cpu")
    device = torch.device(wanted)
    if (device.index or 0) >= count:
        here = "no GPU is" if not count else "only one GPU is" if count == 1 else f"only {count} GPUs are"
        raise EnvironmentFault(f"{key} is {wanted}, but {here} usable here; use auto or cpu")
    return device


def devices_of(mapping: Mapping, uids: Sequence[int]) -> list[torch.device]:
    """The devices of some nodes of this machine, in their order. Raises EnvironmentFault where one is not there."""
    return [device_of(place.device, place.rank) for place in map(mapping.place, uids)]


def schemas_of(
    rules: Rules, model: FlatModel, fragments: Sequence[Fragment] = (), schedule: str = "sequential"
) -> tuple[Schema, ...]:
    """What every exchange of a round looks like: of all fragments in the first phase of their rules, then of all in the
    next one; then of float buffers where the model has any. Without fragments the model is one. schedule: a value of
    `node.schedule`."""
    each = [rules] if isinstance(rules, Sharing) else rules
    sizes = [fragment.elements for fragment in fragments] or [model.num_parameters]
    schemas = []
    for rule, elements in zip(each, sizes, strict=True):
        tensors = payload_schema(schedule, rule, elements, model.dtype)
        schemas.append(Schema(elements, tensors, rule.requirements.elementwise))
    schemas *= each[0].requirements.phases
    if model.buffers.numel():
        count = model.buffers.numel()
        schemas.append(Schema(count, {"x": TensorSpec(model.buffers.dtype, count)}, True))
    return schemas_in(schedule, tuple(schemas))


def place_model(experiment: Experiment, data: DataSpec, device: torch.device) -> torch.nn.Module:
    """Makes the initial model on the device where it is to compute; the log says what copies that costs there."""
    module = make_model(experiment, data).to(device)
    expect_copies(module, device)
    return module


@dataclass(frozen=True)
class SharedModel:
    """A node's model, and in which parts and by which rules it is exchanged."""

    model: FlatModel
    fragments: tuple[Fragment, ...]
    """Empty where the model is exchanged as a whole, in every round over the run's graph."""
    make_rules: Callable[[], list[Sharing]]
    """Makes a rule per fragment as it is before its first round; one for the whole model."""


def shared_model(experiment: Experiment, module: torch.nn.Module, run_graph: Graph | None = None) -> SharedModel:
    """Lays the parameters of `module` out in one flat model, by the section `parameters` of the experiment, and by
    `training.channels_last`. run_graph: `Experiment.make_run_graph`, where nodes come of it."""
    if getattr(experiment.training, "channels_last", False):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    machines = experiment.make_mapping().nodes_by_machine()
    graphs, parameters = experiment.make_fragment_graphs(), experiment.parameters
    run_graph, whole = run_graph or experiment.make_graph(), experiment.make_graph()
    graphs = tuple(run_graph if graph is whole else experiment.repaired(graph) for graph in graphs)
    fragments: tuple[Fragment, ...] = ()
    if parameters is None:
        model = FlatModel(module)
        shapes = [model.shapes]
    else:
        layout = layout_of(parameters, named(module), graphs[0].num_nodes)
        model = FlatModel(module, order=layout.order)
        parts = zip(layout.ranges, parameters.parts(graphs[0].num_nodes), graphs, strict=True)
        fragments = tuple(
            Fragment(start, stop, graph, part.every, part.offset, index)
            for index, ((start, stop), part, graph) in enumerate(parts)
        )
        shapes = [layout.shapes_in(*span) for span in layout.ranges]

    def make_rules() -> list[Sharing]:
        rules = [make_sharing(experiment.sharing, machines) for _ in shapes]
        quorum = experiment.node.quorum
        if quorum is not None and quorum.weights != "neighbors":
            rules = [Weighed(rule, quorum.weights) for rule in rules]
        for rule, each in zip(rules, shapes, strict=True):
            rule.set_parameter_shapes(each)
        return rules

    return SharedModel(model, fragments, make_rules)


def partners_of(uid: int, graphs: Sequence[Graph]) -> frozenset[int] | None:
    """Everybody that a node ever exchanges with in one of these graphs; None where it would take long to find out."""
    found = [graph.partners(uid) for graph in {id(graph): graph for graph in graphs}.values()]
    known = [each for each in found if each is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def build(
    experiment: Experiment, uid: int, make_communication: MakeCommunication, record: Record = lambda _: None,
    device: str | None = None,
) -> Node:
    """The node `uid` with its own share of the data, ready to start. Raises what its parts raise.

    device: overrides the mapping's.
    """
    graph, mapping = experiment.make_run_graph(), experiment.make_mapping()
    place = device_of(device or mapping.place(uid).device, mapping.place(uid).rank)
    data = experiment.open_data()
    module = place_model(experiment, data.spec, place)
    shared = shared_model(experiment, module, graph)
    model = shared.model
    training: Any = load_class(experiment.training.name, TRAININGS, "training")(
        experiment.training, model, experiment.make_task(), data.of(uid), seed=experiment.seed, uid=uid
    )
    rules = shared.make_rules()
    schemas, sampler = schemas_of(rules, model, shared.fragments, experiment.node.schedule), sampler_of(experiment, uid)
    communication = make_communication(schemas if sampler is None else (*schemas, schema_of(sampler)))
    if sampler is None and not rules[0].requirements.overrides_topology:
        buffers = [graph] if model.buffers.numel() else []
        of_fragments = [fragment.graph for fragment in shared.fragments] or [graph]
        communication.partners = partners_of(uid, [*of_fragments, *buffers])
    sampling = None if sampler is None else Sampling(sampler, communication, len(schemas), _profile(sampler, model))
    node_parts = NodeParts(graph, training, rules, communication, shared.make_rules, shared.fragments, sampling)
    return Node(uid, experiment.node, node_parts, seed=experiment.seed, record=record)


def sampler_of(experiment: Experiment, uid: int) -> Sampler | None:
    """The peer sampler of a node, which knows the node's neighbors in the first round of the graph; None where the
    graph says whom it sends to. Raises DataError where nodes are to tell of labels that they do not have."""
    config = experiment.node.sampler
    if config is None:
        return None
    graph, kind = experiment.make_graph(), load_class(config.name, SAMPLERS, "sampler")
    told, shares = kind.tells(config), None
    if told.of == "labels":
        shares = experiment.open_data().label_shares(uid)
        if shares is None:
            raise DataError(f"sampler {config.name} compares nodes by their labels, but this data has none; use by: "
                            "model")  # fmt: skip
    elements = told.elements if shares is None else len(shares)
    around = Surroundings(uid, graph.num_nodes, graph.neighbors(uid, 0), experiment.seed, elements)
    sampler: Sampler = kind(config, around)
    if shares is not None:
        sampler.profile = shares
    return sampler


def _profile(sampler: Sampler, model: FlatModel) -> Callable[[int], np.ndarray | None]:
    """What a node tells of its model as of a round; None where it has nothing new to tell. Whoever comes to a run in
    the middle tells it at once."""
    told = sampler.tells(sampler.config)
    if told.of != "model":
        return lambda _round: None
    sketch = Sketch(sampler.around.seed, model.num_parameters, told.elements)
    return lambda round: None if round % told.every and len(sampler.profile) else sketch(model.parameters)


def build_in_process(
    experiment: Experiment, record: Callable[[int, dict[str, Any]], None] = lambda _uid, _record: None,
    hub: Hub | None = None,
) -> list[Node]:
    """Returns all nodes of a run, made in this process, in the order of their uids.

    record: called with the uid and every record of a node. hub: what their transports (inproc) exchange payloads
    through; one of their own when not given. Reads the data; raises UsageError, DataError.
    """
    hub = hub or Hub(experiment.make_graph().num_nodes)
    config = experiment.communication
    if not isinstance(config, InprocConfig):
        config = InprocConfig.model_validate({"name": "inproc"})
    devices = devices_of(experiment.make_mapping(), range(hub.num_nodes))
    return [
        build(
            experiment, uid,
            lambda schemas, uid=uid: Inproc(  # type: ignore[misc]
                config, uid=uid, hub=hub, schemas=schemas, device=devices[uid]
            ),
            lambda record_, uid=uid: record(uid, record_),  # type: ignore[misc]
        )
        for uid in range(hub.num_nodes)
    ]


def step_all(nodes: list[Node], rounds: int | None = None) -> None:
    """Run nodes of `build_in_process` to their end, each until its next yield, in the order of their uids. Blocking.
    Raises what a node raises.

    rounds: ask for a stop after so many rounds.
    """
    runs = [node.steps() for node in nodes]
    while runs:
        if rounds is not None and nodes[0].round >= rounds:
            nodes[0].ask_stop()
        runs = [run for run in runs if next(run, _END) is not _END]


_END = object()


def limits_of(experiment: Experiment) -> Limits:
    """Returns when a node counts as gone, and which and how many nodes it takes to go on without it."""
    config, node = experiment.communication, experiment.node
    merges = node.on_partition == "both"
    least = node.min_nodes or (1 if merges else experiment.make_mapping().num_nodes // 2 + 1)
    needed = frozenset(experiment.servers())
    return Limits(config.suspect_seconds, config.timeout_seconds, least, node.rounds, needed, merges)
