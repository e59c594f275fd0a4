"""The child that loads the experiment: first the facts that nodes can start with, then what the console says."""

from __future__ import annotations

import json
import os
import traceback

import torch
import yaml

from decentnode import __version__
from decentnode.build import device_of, make_model, threads_of
from decentnode.data import shares
from decentnode.errors import DecentnodeError, EnvironmentFault, MappingError, NodeFailed, UsageError
from decentnode.experiment import Experiment, load
from decentnode.graph import spectrum
from decentnode.graph.file import format_edges
from decentnode.launch.messages import Facts, Failed, Header, Request
from decentnode.launch.pipe import Pipe
from decentnode.launch.provenance import source_hash
from decentnode.launch.schedulers import detect, machine_of
from decentnode.launch.sources import local_modules
from decentnode.launch.traffic_estimate import TrafficEstimate, estimate_traffic
from decentnode.mapping.addresses import own_names
from decentnode.mapping.base import Mapping
from decentnode.mapping.hosts import address, unreachable


def answer(request: Request, channel: Pipe) -> int:
    """Send Facts and Header, or Failed; the exit code."""
    try:
        experiment = load(request.config, request.overrides, request.environ)
        torch.set_num_threads(1)
        channel.send(facts(experiment, request))
        lines = [*header(experiment), *other_code(experiment), *doubts(experiment, request)]
        channel.send(Header(lines, local_modules()))
    except DecentnodeError as error:
        channel.send(Failed(-1, error.exit_code, type(error).__name__, str(error)))
        return error.exit_code
    except Exception as error:
        channel.send(Failed(-1, NodeFailed.exit_code, repr(error), traceback.format_exc()))
        return NodeFailed.exit_code
    return 0


def other_code(experiment: Experiment) -> list[list[str]]:
    """A line for the repetition of a run that was made with other code of decentnode than this."""
    try:
        then = json.loads((experiment.base_dir / "env.json").read_text())["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if then == source_hash():
        return []
    return [["warning", "the run that this repeats was made with other code of decentnode: results may differ"]]


def doubts(experiment: Experiment, request: Request) -> list[list[str]]:
    """A line where this machine may not reach another one, as the mapping has it. Blocking while names are looked up,
    for a few seconds at most."""
    mapping = experiment.make_mapping()
    if mapping.num_machines < 2 or request.in_process:
        return []
    warning = unreachable(mapping, choose_machine(mapping, request.machine, request.config))[1]
    return [["warning", warning]] if warning else []


def choose_machine(mapping: Mapping, wanted: int | str | None, config: str) -> int:
    """The number of this machine. Raises UsageError or MappingError naming what to do."""
    if wanted is None:
        if mapping.num_machines > 1:
            raise UsageError(
                f"{config} is for {mapping.num_machines} machines; start each one's share: "
                f"decentnode launch {config} --machine 0 (then 1, ...), or --machine auto, with the same --set"
            )
        return 0
    if wanted == "auto":
        hint = detect(os.environ)
        return mapping.find_machine(own_names()) if hint is None else machine_of(hint, mapping.num_machines)
    try:
        machine = int(wanted)
    except ValueError:
        raise UsageError(f"--machine must be a number or auto, got {wanted!r}") from None
    if not 0 <= machine < mapping.num_machines:
        raise MappingError(f"--machine must be in [0, {mapping.num_machines}), got {machine}")
    return machine


def facts(experiment: Experiment, request: Request) -> Facts:
    mapping, graph = experiment.make_mapping(), experiment.make_graph()
    machine = choose_machine(mapping, request.machine, request.config)
    if request.join and experiment.node.missing != "regroup":
        raise UsageError(f"{request.config}: --join needs node.missing: regroup, which a run must have from its start")
    machines = [list(mapping.local(number)) for number in range(mapping.num_machines)]
    in_process = request.in_process or experiment.communication.name == "inproc"
    if in_process and len(machines) > 1 and not request.in_process:
        raise UsageError(f"{request.config}: communication inproc runs all nodes in one process, on one machine")
    if in_process:
        machine, machines = 0, [list(range(graph.num_nodes))]
    elif unreachable_here := unreachable(mapping, machine)[0]:
        raise EnvironmentFault(f"{request.config}: {unreachable_here}")
    inputs, kept = keep(experiment)
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    communication, lists = experiment.communication, getattr(graph, "lists", None)
    return Facts(
        name=experiment.name,
        digest=experiment.digest(),
        runs_dir=str(experiment.run_dir),
        config_text=experiment.written_yaml(kept),
        resolved_text=experiment.resolved_yaml(kept),
        graph_text=format_edges(lists(0)) if lists is not None and graph.period == 1 else "",
        mapping_text=yaml.safe_dump([vars(place) for place in places], sort_keys=False),
        rounds=experiment.node.rounds,
        evaluate_every=experiment.node.evaluate_every,
        in_process=in_process,
        timeout_seconds=float(getattr(communication, "timeout_seconds", 60.0)),
        start_timeout_seconds=float(getattr(communication, "start_timeout_seconds", 60.0)),
        machine=machine,
        machines=machines,
        hosts=[mapping.place(uids[0]).host for uids in machines],
        threads={str(uid): threads_of(experiment, uid) for uid in machines[machine]},
        regroup=experiment.node.missing == "regroup" and not in_process,
        restarts=experiment.node.restarts,
        inputs=inputs,
    )


def keep(experiment: Experiment) -> tuple[dict[str, str], dict[str, str]]:
    """(files by their name in the run directory, what its configs say for each path).

    Copied are the experiment's own files as they were written, graphs, weights and mappings. Data is too large and
    keys are secret: they stay where they are. `run.dir` is the folder beside the run's.
    """
    inputs: dict[str, str] = {}

    def copied(path: str) -> str:
        name = f"inputs/{os.path.basename(path)}"
        while inputs.get(name, path) != path:
            name = f"inputs/other_{os.path.basename(name)}"
        inputs[name] = path
        return name

    for file in experiment.files:
        copied(os.path.abspath(file))
    kept: dict[str, str] = {}
    for key, path in experiment.paths().items():
        small = key.split(".")[0] in ("graph", "weights", "mapping") and path.is_file()
        kept[key] = copied(str(path)) if small else str(path)
    return inputs, {**kept, "run.dir": "../.."}


def header(experiment: Experiment) -> list[list[str]]:
    """(label, text) lines; builds one model and deals the data, as every node does."""
    graph = experiment.make_graph()
    dataset, parts = shares(experiment.data, graph.num_nodes, experiment.seed, experiment.base_dir)  # type: ignore[arg-type]
    module = make_model(experiment, dataset.input_shape, dataset.num_classes)
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    sizes = [len(part) for part in parts]
    neighbors = [len(graph.neighbors(uid, 0)) for uid in range(graph.num_nodes)]
    partition = getattr(experiment.data, "partition", None)
    return [
        ["versions", _versions(experiment)],
        ["graph", f"{experiment.graph.name}, {graph.num_nodes} nodes, {_degrees(neighbors)}{_gap(experiment)}"],
        ["data", f"{experiment.data.name}, {sum(sizes):,} training samples, {_section(partition)}: "
                 f"smallest node {min(sizes):,}, largest {max(sizes):,}"],
        ["model", f"{experiment.model.name}, {count:,} parameters: {size(count * 4)}"],
        ["sharing", f"{_rule(experiment)}: {_told(estimate_traffic(experiment, module))}"],
        *([["warning", exposed]] if (exposed := exposure(experiment)) else []),
    ]  # fmt: skip


def _rule(experiment: Experiment) -> str:
    """"topk with int8"."""
    codec = getattr(experiment.sharing, "compression", None)
    return experiment.sharing.name + (f" with {codec.name}" if codec is not None else "")


def _told(found: TrafficEstimate) -> str:
    most = "" if found.exact else "at most "
    when = "per round" if found.first == 0 else f"per exchange, the first in round {found.first}"
    return f"{most}{size(found.message)} per message, {most}{size(found.sent)} sent per node {when}"


def exposure(experiment: Experiment) -> str:
    """What it means that nodes listen on an open interface without security; empty where they do not."""
    config, mapping = experiment.communication, experiment.make_mapping()
    if not config.networked or config.key_folder is not None:
        return ""
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    open_ = sorted({place.bind for place in places if place.port is not None and not _is_loopback(place.bind)})
    if not open_:
        return ""
    return (
        f"nodes listen on {', '.join(open_[:4])}{', ...' if len(open_) > 4 else ''} without security: whoever reaches "
        f"these ports can read the models and disturb the run; make keys with decentnode keygen and set "
        f"communication: {{security: required, keys: ...}}"
    )


def _is_loopback(host: str) -> bool:
    known = address(host)
    return host == "localhost" if known is None else known.is_loopback


def _versions(experiment: Experiment) -> str:
    import zmq

    device = device_of(experiment.make_mapping().place(0).device)
    threads = threads_of(experiment, 0)
    where = f"GPU {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "CPU"
    per_node = f"{threads} thread{'s' if threads != 1 else ''} per node"
    return f"decentnode {__version__} · torch {torch.__version__} · zmq {zmq.zmq_version()} · {where}, {per_node}"


def _degrees(neighbors: list[int]) -> str:
    low, high = min(neighbors), max(neighbors)
    return f"degree {low}" if low == high else f"degrees {low} to {high}"


def _gap(experiment: Experiment) -> str:
    """Skipped where it would take long."""
    graph = experiment.make_graph()
    if not 1 < graph.num_nodes <= 256:
        return ""
    rounds = spectrum.rounds_to_consensus(graph)
    about = f" (consensus to 1e-3 in about {rounds} rounds)" if rounds is not None else ""
    return f", spectral gap {spectrum.spectral_gap(graph):.3f}{about}"


def _section(config: object) -> str:
    """"dirichlet alpha 0.5" for a section."""
    values = {key: value for key, value in dict(config or {}).items() if key != "name"}  # type: ignore[call-overload]
    return " ".join([str(getattr(config, "name", "iid")), *(f"{key} {value}" for key, value in values.items())])


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
