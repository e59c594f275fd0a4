"""Loads the experiment for the supervisor in a child process, which sends it the `Facts`, then the `Header`."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

import psutil
import torch
import yaml

from decentnode.build import devices_of, limits_of, processes_of, threads_of
from decentnode.errors import CheckpointError, DecentnodeError, EnvironmentFault, MappingError, NodeFailed, UsageError
from decentnode.experiment import Experiment
from decentnode.experiment.derived import searched
from decentnode.experiment.initial_model import module_without_values
from decentnode.formatting import size
from decentnode.graph.file import format_edges
from decentnode.graph.optima import known_optima
from decentnode.launch import open_files
from decentnode.launch.children.messages import Facts, Failed, Header, Request
from decentnode.launch.children.own_modules import local_modules
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.files import resume
from decentnode.launch.loading import load_request
from decentnode.launch.one_process.world_run import needs_world, simulation_refusal
from decentnode.launch.reporting.header import changed_code_warning, header
from decentnode.launch.supervising.schedulers import detect, machine_of
from decentnode.mapping.addresses import own_names
from decentnode.mapping.base import Mapping
from decentnode.mapping.hosts import unreachable
from decentnode.tensors import training_bytes

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""YAML dumper for the mapping's places: for thousands of nodes, the one in C takes milliseconds, the other seconds."""


def load_and_send(request: Request, channel: Pipe) -> int:
    """Loads the experiment and sends Facts and Header, or Failed. Returns the exit code. Raises only OSError, if
    the supervisor is gone."""
    try:
        experiment = load_request(request)
        torch.set_num_threads(1)
        found = facts(experiment, request)
        channel.send(found)
        here = found.local[:1] if request.simulate else found.local
        lines = [*resume_lines(experiment, request), *header(experiment, here), *changed_code_warning(experiment),
                 *address_warnings(experiment, request)]  # fmt: skip
        channel.send(Header(lines, local_modules()))
    except DecentnodeError as error:
        channel.send(Failed(-1, error.exit_code, type(error).__name__, str(error)))
        return error.exit_code
    except Exception as error:
        channel.send(Failed(-1, NodeFailed.exit_code, repr(error), traceback.format_exc()))
        return NodeFailed.exit_code
    return 0


def resume_lines(experiment: Experiment, request: Request) -> list[list[str]]:
    """Returns header lines about the checkpoints from which the run is resumed; empty for a new run."""
    if request.resume is None:
        return []
    resumable = resume.find(experiment, request.resume)
    if resumable is None:
        return [["resume", "no checkpoint on this machine: its nodes start from the mean of the others' models"]]
    lines = [["resume", f"{resumable.run}, newest checkpoint here after round {resumable.newest.round}"]]
    if experiment.faults:
        note = "`faults` of later rounds apply to it, and timed ones count from its start"
        lines.append(["", f"{note}; --set 'faults=[]' continues without any"])
    return lines


def address_warnings(experiment: Experiment, request: Request) -> list[list[str]]:
    """Returns a warning line if this machine may be unable to reach another one at the mapping's addresses, else
    nothing. Blocking while names are looked up, for a few seconds at most."""
    mapping = experiment.make_mapping()
    if mapping.num_machines < 2 or request.in_process:
        return []
    warning = unreachable(mapping, choose_machine(mapping, request.machine, request.shown))[1]
    return [["warning", warning]] if warning else []


def choose_machine(mapping: Mapping, wanted: int | str | None, config: str) -> int:
    """Returns the number of this machine. wanted: a number, "auto" (found by the scheduler's variables, else by
    address), or None if there is only one machine. Raises UsageError or MappingError, whose texts say what to do."""
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


def _check_request(experiment: Experiment, request: Request, in_world: bool) -> None:
    """Raises UsageError if the experiment does not support the request. in_world: whether its faults or newcomers are
    simulated."""
    if request.join and experiment.node.missing != "regroup":
        raise UsageError(f"{request.shown}: --join needs node.missing: regroup, with which the run must have been "
                         "started")
    if in_world and (why := simulation_refusal(experiment, request.resume is not None)):
        raise UsageError(f"{request.shown}: {why}, or simulate it with --set 'faults=[]' --set "
                         "'simulate.newcomers=[]'")  # fmt: skip


def _resumed_runs(experiment: Experiment, request: Request, num_machines: int) -> resume.ResumableRun | None:
    """Returns the runs to resume from; None if none are requested, or if there are none here but other machines may
    have them. Raises CheckpointError if there are none on the only machine."""
    if request.resume is None:
        return None
    resumable = resume.find(experiment, request.resume)
    if resumable is None and num_machines == 1:
        raise CheckpointError(f"{request.shown}: no checkpoint of a run named {experiment.name} in "
                              f"{experiment.run_dir}; node.checkpoint (such as {{every: 20}}) makes them")  # fmt: skip
    return resumable


def facts(experiment: Experiment, request: Request) -> Facts:
    """Returns what the supervisor needs to know about the experiment. Raises UsageError, MappingError, CheckpointError
    or EnvironmentFault if it cannot run on this machine."""
    mapping, graph = experiment.make_mapping(), experiment.make_graph()
    machine = 0 if request.in_process else choose_machine(mapping, request.machine, request.shown)
    in_world = request.simulate and needs_world(experiment)
    _check_request(experiment, request, in_world)
    machines = [list(uids) for uids in mapping.nodes_by_machine()]
    in_process = request.in_process or experiment.communication.name == "inproc"
    if in_process and len(machines) > 1 and not request.in_process:
        raise UsageError(f"{request.shown}: communication inproc runs all nodes in one process, on one machine")
    if in_process:
        machine, machines = 0, [list(range(graph.num_nodes))]
    elif unreachable_here := unreachable(mapping, machine)[0]:
        raise EnvironmentFault(f"{request.shown}: {unreachable_here}")
    resumable = _resumed_runs(experiment, request, len(machines))
    if not request.simulate:
        devices_of(mapping, machines[machine])
    experiment.open_data().check_private_files(machines[machine])
    check_memory(experiment, machines[machine])
    if not in_process and not request.simulate:
        open_files.check(experiment, machine)
    inputs, kept = files_to_copy(experiment)
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    communication, lists = experiment.communication, getattr(graph, "lists", None)
    return Facts(
        name=experiment.name,
        digest=experiment.digest(),
        runs_dir=str(experiment.run_dir),
        config_text=experiment.written_yaml(kept),
        resolved_text=experiment.resolved_yaml(kept),
        graph_text=format_edges(lists(0)) if lists is not None and graph.period == 1 else "",
        mapping_text=yaml.dump([vars(place) for place in places], sort_keys=False, Dumper=_DUMPER),
        rounds=experiment.node.rounds,
        evaluate_every=experiment.node.evaluate_every,
        in_process=in_process,
        timeout_seconds=float(getattr(communication, "timeout_seconds", 60.0)),
        start_timeout_seconds=float(getattr(communication, "start_timeout_seconds", 60.0)),
        machine=machine,
        machines=machines,
        hosts=[mapping.place(uids[0]).host for uids in machines],
        threads={str(uid): 1 if request.forked else threads_of(experiment, uid)
                 for uid in machines[machine][: 1 if in_process else None]},
        regroup=experiment.node.missing == "regroup" and (in_world or not in_process),
        own_rounds=experiment.node.schedule not in ("sequential", "overlapped"),
        continues_on_partition=experiment.node.on_partition == "both",
        restarts=experiment.node.restarts,
        task=experiment.measured().plain(),
        processes=[machines[0]] if in_process else [list(uids) for uids in processes_of(experiment, machine)],
        found=searched(experiment),
        optima=known_optima(),
        inputs=inputs,
        faults=[fault.model_dump(mode="json", exclude_none=True) for fault in experiment.make_faults()],
        checks_records=bool(experiment.faults) and experiment.run.record is not False,
        min_nodes=limits_of(experiment).min_nodes,
        newcomers=experiment.node.newcomers,
        attackers=[*experiment.attackers()],
        trackers=[each.model_dump(mode="json") for each in experiment.run.trackers],
        resume=None if request.resume is None else [] if resumable is None else [*map(str, resumable.folders)],
        resume_runs=[] if resumable is None else list(resumable.runs),
        pauses_before_stop=not in_process and experiment.node.checkpoint is not None
        and experiment.node.schedule in ("sequential", "overlapped"),
        finished="" if resumable is None or len(machines) > 1 else resume.finished(resumable, experiment),
    )


def check_memory(experiment: Experiment, uids: Sequence[int]) -> None:
    """Raises EnvironmentFault if this machine's memory is too small for the models and gradients, which are the least
    that nodes need, of those `uids` that are not on a GPU. Allocates nothing."""
    model_bytes = training_bytes(module_without_values(experiment, experiment.open_data().spec))
    memory = psutil.virtual_memory().total
    if len(uids) * model_bytes <= memory:
        return
    count = sum(device.type == "cpu" for device in devices_of(experiment.make_mapping(), uids))
    if count * model_bytes > memory:
        nodes = f"{count} node{'s' if count > 1 else ''}"
        raise EnvironmentFault(
            f"model {experiment.model.name}: the parameters and gradients of {nodes} take {size(count * model_bytes)}, "
            f"this machine has {size(memory)} of memory; choose a smaller model, or fewer nodes per machine"
        )


def files_to_copy(experiment: Experiment) -> tuple[dict[str, str], dict[str, str]]:
    """Returns (name in the run directory -> path of the file to copy there; config key -> path to write in the copied
    configs).

    Copied are the experiment's own files as they were written, graphs, weights, mappings and the initial model, which
    is as large as the model that each node saves. Data is too large and keys are secret: they stay where they are.
    `run.dir` becomes the folder of the experiment's runs.
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
        part = key.split(".")[0] in ("graph", "weights", "mapping") or key == "model.init"
        kept[key] = copied(str(path)) if part and path.is_file() else str(path)
    return inputs, {**kept, "run.dir": "../.."}
