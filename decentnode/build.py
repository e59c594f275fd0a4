"""Builds the node of one uid, or all nodes in one process, from an experiment: the one place where all packages
meet."""

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
from decentnode.data.poisoned import poisoned
from decentnode.errors import DataError, EnvironmentFault, UsageError
from decentnode.experiment import Experiment
from decentnode.experiment.initial_model import make_model, module_without_values
from decentnode.graph.base import Graph
from decentnode.mapping.base import Mapping, checked_device
from decentnode.models.recurrent import log_weight_copies
from decentnode.node.node import Node, NodeParts
from decentnode.node.rounds import Record
from decentnode.node.rules import Rules
from decentnode.node.sampling import Sampling, Sketch, sampler_schema
from decentnode.node.schedules.schedules import payload_schema, schemas_in
from decentnode.payload import TensorSpec
from decentnode.samplers import SAMPLERS
from decentnode.samplers.base import Sampler, Surroundings
from decentnode.samples import DataSpec, NodeSamples
from decentnode.sharing.attacks import ATTACKS
from decentnode.sharing.attacks.attacked import Attacked
from decentnode.sharing.attacks.base import Attack
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.parameters import layout_of, named
from decentnode.sharing.weighted_by_training import WeightedByTraining
from decentnode.tensors import FlatModel
from decentnode.training import TRAININGS
from decentnode.wire.generation import Limits

MakeCommunication = Callable[[tuple[Schema, ...]], Communication]


NODES_PER_CORE = 4
"""With `mapping.nodes_per_process: auto`, a machine with more nodes per core than this runs one process per core."""
SMALL_MODEL_BYTES = 16 << 20
"""`auto` puts several nodes into one process only for models up to this size. Larger models spend their time in
computation, and with a process per node each node has the memory of its process to itself."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_of(experiment: Experiment, machine: int) -> list[tuple[int, ...]]:
    """Returns the nodes of one machine, ascending, grouped by the process that runs them
    (`mapping.nodes_per_process`)."""
    local = experiment.make_mapping().local(machine)
    configured = getattr(experiment.mapping, "nodes_per_process", 1)
    each = _nodes_per_process(experiment, local) if configured == "auto" else configured
    return [local[first : first + each] for first in range(0, len(local), each)]


def _nodes_per_process(experiment: Experiment, local: Sequence[int]) -> int:
    """Returns how many nodes each process of this machine runs when `mapping.nodes_per_process` is `auto`."""
    mapping, cores = experiment.make_mapping(), _cores()
    if len(local) <= NODES_PER_CORE * cores or not experiment.communication.steps_nodes:
        return 1
    if any(device.type != "cpu" for device in devices_of(mapping, local)):
        return 1
    module = module_without_values(experiment, experiment.open_data().spec)
    size = sum(each.numel() * each.element_size() for each in module.parameters())
    return -(-len(local) // cores) if size <= SMALL_MODEL_BYTES else 1


def threads_of(experiment: Experiment, uid: int) -> int:
    """Returns the number of threads of a node's process: the mapping's value, or its fraction of this machine's
    cores."""
    mapping = experiment.make_mapping()
    place = mapping.place(uid)
    if place.threads is not None:
        return place.threads
    return max(1, _cores() // len(processes_of(experiment, place.machine)))


def device_of(wanted: str, rank: int = 0, key: str = "mapping.device") -> torch.device:
    """Returns the torch device that auto, cpu, cuda or cuda:N means for the node of this rank on its machine.

    A GPU is returned with its index. key: the configuration key to name in errors. Raises UsageError for any other
    word, and EnvironmentFault when the device does not exist here.
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
        available = "no GPU is" if not count else "only one GPU is" if count == 1 else f"only {count} GPUs are"
        raise EnvironmentFault(f"{key} is {wanted}, but {available} usable here; use auto or cpu")
    return device


def devices_of(mapping: Mapping, uids: Sequence[int]) -> list[torch.device]:
    """Returns the devices of these nodes of this machine, in the same order. Raises EnvironmentFault if one is
    missing."""
    return [device_of(place.device, place.rank) for place in map(mapping.place, uids)]


def schemas_of(
    rules: Rules, model: FlatModel, fragments: Sequence[Fragment] = (), schedule: str = "sequential"
) -> tuple[Schema, ...]:
    """Returns the payload schemas of all exchanges of one round, in the order in which they happen.

    The order is: all fragments in the first phase of their rules, then all fragments in the next phase, and so on; then
    the floating-point buffers, if the model has any. Without fragments the whole model counts as one. schedule: a value
    of `node.schedule`.
    """
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


def make_model_on_device(experiment: Experiment, data: DataSpec, device: torch.device) -> torch.nn.Module:
    """Makes the initial model on the device where it will run, and logs the copies that recurrent layers make there."""
    module = make_model(experiment, data).to(device)
    log_weight_copies(module, device)
    return module


@dataclass(frozen=True)
class SharedModel:
    """A node's flat model with the fragments and the sharing rules by which it is exchanged."""

    model: FlatModel
    fragments: tuple[Fragment, ...]
    """Empty if the whole model is exchanged in every round over the run's graph."""
    make_rules: Callable[[], list[Sharing]]
    """Makes new rules, in the state before the first round: one per fragment, or one for the whole model."""


def shared_model(experiment: Experiment, module: torch.nn.Module, run_graph: Graph | None = None) -> SharedModel:
    """Lays out the parameters of `module` in one flat model, following `parameters` and `training.channels_last`.

    run_graph: the result of `Experiment.make_run_graph`; by default, the experiment's graph.
    """
    if getattr(experiment.training, "channels_last", False):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    machines = experiment.make_mapping().nodes_by_machine()
    graphs, parameters = experiment.make_fragment_graphs(), experiment.parameters
    run_graph, base_graph = run_graph or experiment.make_graph(), experiment.make_graph()
    graphs = tuple(run_graph if graph is base_graph else experiment.repaired(graph) for graph in graphs)
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
            rules = [WeightedByTraining(rule, quorum.weights) for rule in rules]
        if experiment.attack is not None:
            over = [fragment.graph for fragment in fragments] or [run_graph]
            rules = [Attacked(rule, make_attack(experiment), experiment.attackers(), graph)
                     for rule, graph in zip(rules, over, strict=True)]  # fmt: skip
        for rule, each in zip(rules, shapes, strict=True):
            rule.set_parameter_shapes(each)
        return rules

    return SharedModel(model, fragments, make_rules)


def make_attack(experiment: Experiment) -> Attack:
    """Returns a new attack of the section `attack`, in the state before the first round."""
    assert experiment.attack is not None
    made: Attack = load_class(experiment.attack.name, ATTACKS, "attack")(experiment.attack)
    return made


def samples_of(experiment: Experiment, uid: int) -> NodeSamples:
    """Returns the samples that a node trains and is tested on; an attacker may train on other labels. Raises
    DataError."""
    data = experiment.open_data()
    samples, classes = data.of(uid), data.spec.num_classes
    if uid not in experiment.attackers() or classes is None:
        return samples
    attack = make_attack(experiment)
    if type(attack).labels is Attack.labels:
        return samples
    return poisoned(samples, lambda labels: attack.labels(labels, classes))


def exchange_partners(uid: int, graphs: Sequence[Graph]) -> frozenset[int] | None:
    """Returns all nodes that this node ever exchanges with in these graphs, or None if that is too slow to find out."""
    found = [graph.partners(uid) for graph in {id(graph): graph for graph in graphs}.values()]
    known = [each for each in found if each is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def build(
    experiment: Experiment, uid: int, make_communication: MakeCommunication, record: Record = lambda _: None,
    device: str | None = None,
) -> Node:
    """Returns the node `uid` with its own share of the data, ready to start. Raises what its components raise.

    device: used instead of the mapping's.
    """
    graph, mapping = experiment.make_run_graph(), experiment.make_mapping()
    place = device_of(device or mapping.place(uid).device, mapping.place(uid).rank)
    data = experiment.open_data()
    module = make_model_on_device(experiment, data.spec, place)
    shared = shared_model(experiment, module, graph)
    model = shared.model
    training: Any = load_class(experiment.training.name, TRAININGS, "training")(
        experiment.training, model, experiment.make_task(), samples_of(experiment, uid), seed=experiment.seed, uid=uid
    )
    rules = shared.make_rules()
    schemas, sampler = schemas_of(rules, model, shared.fragments, experiment.node.schedule), sampler_of(experiment, uid)
    communication = make_communication(schemas if sampler is None else (*schemas, sampler_schema(sampler)))
    if sampler is None and not rules[0].requirements.overrides_topology:
        buffers = [graph] if model.buffers.numel() else []
        of_fragments = [fragment.graph for fragment in shared.fragments] or [graph]
        communication.partners = exchange_partners(uid, [*of_fragments, *buffers])
    sampling = None if sampler is None else Sampling(sampler, communication, len(schemas), _profile(sampler, model))
    node_parts = NodeParts(graph, training, rules, communication, shared.make_rules, shared.fragments, sampling,
                           frozenset(experiment.attackers()))  # fmt: skip
    return Node(uid, experiment.node, node_parts, seed=experiment.seed, record=record)


def sampler_of(experiment: Experiment, uid: int) -> Sampler | None:
    """Returns the peer sampler of a node, which starts with the node's neighbors in the graph's first round.

    Returns None if the graph alone determines whom the node sends to. Raises DataError if the sampler compares nodes by
    labels and the data has none.
    """
    config = experiment.node.sampler
    if config is None:
        return None
    graph, kind = experiment.make_graph(), load_class(config.name, SAMPLERS, "sampler")
    profile_spec, shares = kind.tells(config), None
    if profile_spec.of == "labels":
        shares = experiment.open_data().label_shares(uid)
        if shares is None:
            raise DataError(f"sampler {config.name} compares nodes by their labels, but this data has none; use by: "
                            "model")  # fmt: skip
    elements = profile_spec.elements if shares is None else len(shares)
    around = Surroundings(uid, graph.num_nodes, graph.neighbors(uid, 0), experiment.seed, elements)
    sampler: Sampler = kind(config, around)
    if shares is not None:
        sampler.profile = shares
    return sampler


def _profile(sampler: Sampler, model: FlatModel) -> Callable[[int], np.ndarray | None]:
    """Returns a function of the round that computes the node's profile of its model, a sketch of the parameters.

    The function returns None in rounds in which no new profile is due. A node that joins a running experiment has no
    profile yet and therefore computes one at once.
    """
    profile_spec = sampler.tells(sampler.config)
    if profile_spec.of != "model":
        return lambda _round: None
    sketch = Sketch(sampler.around.seed, model.num_parameters, profile_spec.elements)
    return lambda round: None if round % profile_spec.every and len(sampler.profile) else sketch(model.parameters)


def build_in_process(
    experiment: Experiment, record: Callable[[int, dict[str, Any]], None] = lambda _uid, _record: None,
    hub: Hub | None = None,
) -> list[Node]:
    """Returns all nodes of a run, in the order of their uids, all made in this process.

    record: called with the uid and every record of a node. hub: the in-process hub through which the nodes exchange
    payloads; a new one by default. Reads the data; raises UsageError, DataError.
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
    """Runs the nodes of `build_in_process` until all have ended: each in turn, by uid, up to its next yield. Blocking.

    rounds: ask the nodes to stop after this many rounds. Raises what a node raises.
    """
    runs = [node.steps() for node in nodes]
    while runs:
        if rounds is not None and nodes[0].round >= rounds:
            nodes[0].ask_stop()
        runs = [run for run in runs if next(run, _END) is not _END]


_END = object()


def limits_of(experiment: Experiment) -> Limits:
    """Returns when a node counts as lost, and which and how many nodes must remain for the run to continue."""
    config, node = experiment.communication, experiment.node
    merges = node.on_partition == "both"
    least = node.min_nodes or (1 if merges else experiment.make_mapping().num_nodes // 2 + 1)
    needed = frozenset(experiment.servers())
    return Limits(config.suspect_seconds, config.timeout_seconds, least, node.rounds, needed, merges)
