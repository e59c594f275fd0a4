"""Runs one node in its own process: builds it, opens its sockets, exchanges addresses, joins, runs, saves. The
functions for single steps also serve several_nodes.py and one_process/."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from decentnode import clock, logs
from decentnode.build import build, device_of, limits_of
from decentnode.communication import COMMUNICATIONS
from decentnode.communication.base import Communication
from decentnode.communication.parts import BindPlan, Growth, LinkFaults, Schema, TransportParts
from decentnode.communication.shared_process import SharedProcess
from decentnode.config.component import load_class
from decentnode.errors import (
    DecentnodeError,
    EnvironmentFault,
    Interrupted,
    NodeFailed,
    NoGeneration,
    PeerLost,
    UsageError,
)
from decentnode.experiment import Digests, Experiment
from decentnode.faults import NetworkFault
from decentnode.launch.children.messages import (
    Bound,
    ChildMessage,
    Failed,
    FaultDue,
    Finished,
    LeaveAnswer,
    LeaveRun,
    NodeJoined,
    NodesAbsent,
    OrderRun,
    PeerFailure,
    Peers,
    StopRun,
    Task,
    Terminated,
)
from decentnode.launch.children.own_modules import local_modules
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.children.signals import on_termination
from decentnode.launch.files.node_files import NodeRecords, Reporter, resolve_recording, save_node
from decentnode.launch.files.resume import attach
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.loading import load_request
from decentnode.mapping.hosts import endpoint
from decentnode.mapping.newcomer import Newcomer, machine_of
from decentnode.node.faults import NodeFaults
from decentnode.node.node import Node
from decentnode.system import raise_open_files_limit
from decentnode.tensors import keep_freed_memory
from decentnode.training.cudnn import apply_cudnn_settings
from decentnode.wire.messages import MAX_CONFIG_BYTES
from decentnode.wire.orders import Action

logger = logging.getLogger(__name__)

PEERS_SECONDS = 300.0
"""Longest wait for the supervisor to send the addresses of the other local nodes; the supervisor gives up first."""
ABSENT_SECONDS = 1.0
"""Time between two reports of which nodes are not connected yet."""
SUPERVISOR_SECONDS = 0.5
"""How long the other nodes of this machine may take to learn from the supervisor that a failure ends the run."""
REPORT_TERMINATION_SECONDS = 3.0
"""A scheduler ends a run by SIGTERM to all of its processes, and the supervisor then stops all nodes with checkpoints
before the same round. It may not have received the signal itself, so after this time the nodes report theirs to it."""
FORCED_STOP_SECONDS = 20.0
"""Time from SIGTERM after which nodes with checkpoints stop even if the supervisor has not stopped them: schedulers
kill after 30 s (Slurm, Kubernetes)."""
CLOSE_SECONDS = 2.0
"""How long a checkpoint may still be written after a failure; the supervisor ends the process soon after."""


class Commands:
    """Receives the supervisor's messages in its own thread and passes them to the nodes of this process. The process
    exits when the supervisor is gone."""

    def __init__(self, channel: Pipe, join: bool) -> None:
        """join: whether the nodes join a run that has already begun. Failures of other nodes before they are admitted
        do not concern them."""
        self._channel, self._join = channel, join
        self._peers: queue.SimpleQueue[Peers | PeerFailure | StopRun] = queue.SimpleQueue()
        self._nodes: dict[int, Node] = {}
        self._earlier: list[PeerFailure | StopRun] = []
        """Failures and stops received so far, for nodes that are attached later."""
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="commands", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                os._exit(1)
            outside = self._join and not self._nodes
            if isinstance(message, PeerFailure) and outside:
                continue
            if isinstance(message, Peers | PeerFailure | StopRun):
                self._peers.put(message)
            with self._lock:
                if isinstance(message, PeerFailure | StopRun):
                    self._earlier.append(message)
                for node in self._nodes.values():
                    self._deliver(node, message)
                if isinstance(message, OrderRun) and self._nodes:
                    self._nodes[min(self._nodes)].order(cast(Action, message.action))
                if isinstance(message, LeaveRun):
                    self._leave(message)

    def _leave(self, asked: LeaveRun) -> None:
        """Asks a node to leave, or answers why it cannot. If the pipe is broken, only the answer is lost."""
        node = self._nodes.get(asked.uid)
        refusal = "it does not take part in any round yet" if node is None else node.refusal_to_leave(asked.others)
        if node is not None and not refusal:
            node.ask_leave()
        with contextlib.suppress(OSError):
            self._channel.send(LeaveAnswer(asked.uid, refusal))

    @staticmethod
    def _deliver(node: Node, message: ChildMessage) -> None:
        if isinstance(message, StopRun):
            node.ask_stop()
        elif isinstance(message, PeerFailure) and message.uid != node.uid:
            node.communication.fail(message.uid, message.reason, ends_run=message.ends_run)

    def attach(self, node: Node) -> None:
        """Passes stops and failures to the node from now on, and those received before."""
        with self._lock:
            self._nodes[node.uid] = node
            for message in self._earlier:
                self._deliver(node, message)

    def detach(self, uid: int) -> None:
        """Stops passing messages to a node, because it has ended."""
        with self._lock:
            self._nodes.pop(uid, None)

    def peers(self) -> dict[str, list[str]]:
        """Waits for the endpoints of the local nodes and returns them: uid -> [control, bulk]. Blocking. Raises
        PeerLost if a local node failed, Interrupted if the run was stopped, NodeFailed after PEERS_SECONDS."""
        try:
            message = self._peers.get(timeout=PEERS_SECONDS)
        except queue.Empty:
            raise NodeFailed("the supervisor did not send the addresses of the other nodes") from None
        if isinstance(message, PeerFailure):
            raise PeerLost(f"node {message.uid} failed: {message.reason}", [message.uid])
        if isinstance(message, StopRun):
            raise Interrupted("stopped before the run began")
        return message.endpoints


def remote_endpoints(experiment: Experiment, machine: int) -> dict[int, tuple[str, str]]:
    """Returns uid -> (control, bulk) endpoints of the nodes on other machines, from the mapping."""
    mapping = experiment.make_mapping()
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    return {
        place.uid: (endpoint(place.host, place.port), endpoint(place.host, place.port + 1))
        for place in places
        if place.machine != machine and place.port is not None
    }


def bind_plan(experiment: Experiment, uid: int, socket_dir: str, earlier_endpoints: Sequence[str] = ()) -> BindPlan:
    """Returns where a node listens: on Unix sockets for the same machine unless tcp is asked for, and on tcp ports for
    other machines or where the mapping has a port. earlier_endpoints: where the node listened before it was
    restarted."""
    place = experiment.make_mapping().place(uid)
    ipc = Path(socket_dir) if experiment.communication.unix_sockets and socket_dir else None
    return BindPlan(ipc_dir=ipc, host=place.bind, port=place.port, again=tuple(earlier_endpoints))


def transport_maker(
    experiment: Experiment, task: Task, uid: int, process: SharedProcess | None = None,
    digests: Digests | None = None,
) -> Callable[[tuple[Schema, ...]], Communication]:
    """Returns a function that makes the node's transport from the schemas of its sharing rule. process: what the node
    shares with others of its process. digests: the experiment's digests, if already computed (that takes
    milliseconds)."""
    mapping = experiment.make_mapping()
    config = experiment.communication
    transport: type[Communication] = load_class(config.name, COMMUNICATIONS, "communication")
    device = device_of(mapping.place(uid).device, mapping.place(uid).rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def make(schemas: tuple[Schema, ...]) -> Communication:
        known = digests or experiment.digests()
        return transport.make(config, TransportParts(
            uid=uid, schemas=schemas, digest=known.whole, sections=known.sections, base_dir=experiment.base_dir,
            device=device,
            machine_of={u: mapping.place(u).machine if u < mapping.num_nodes else machine_of(u, mapping)
                        for u in range(mapping.num_nodes + experiment.node.newcomers)},
            run_id=bytes.fromhex(task.run_id) if task.run_id and uid == 0 else None,
            bind=bind_plan(experiment, uid, task.socket_dir, task.endpoints.get(str(uid), [])),
            limits=limits_of(experiment) if experiment.node.missing == "regroup" else None,
            process=process, faults=link_faults(experiment), growth=growth_of(experiment),
            relayed=frozenset(u for u in range(mapping.num_nodes) if mapping.place(u).behind_nat),
        ))

    return make


def growth_of(experiment: Experiment) -> Growth | None:
    """Returns what a transport needs to admit newcomers; None if the run admits none. Raises UsageError if the
    experiment is too long to be sent to them."""
    if not experiment.node.newcomers:
        return None
    mapping, newcomer = experiment.make_mapping(), experiment.newcomer
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    text = experiment.resolved_yaml().encode()
    if len(text) > MAX_CONFIG_BYTES:
        raise UsageError(f"node.newcomers: the experiment has {len(text)} bytes, at most {MAX_CONFIG_BYTES} can be "
                         "sent to newcomers")  # fmt: skip
    control = {place.uid: endpoint(place.host, place.port) for place in places if place.port is not None}
    token, seats = (b"", b"") if newcomer is None else (newcomer.token, newcomer.seats)
    return Growth(mapping.num_nodes, text, control, token, seats)


def link_faults(experiment: Experiment) -> LinkFaults | None:
    """Returns the fault plan for the transport if it has faults on links between nodes, else None."""
    plan = experiment.make_faults()
    between = any(isinstance(fault, NetworkFault) for fault in plan)
    return LinkFaults(plan, experiment.seed) if between else None


def attach_faults(node: Node, experiment: Experiment, send: Callable[[ChildMessage], None]) -> None:
    """Attaches the experiment's fault plan to a node. Its faults take effect once `node.rounds.faults.begin` is called.
    """
    plan = experiment.make_faults()
    if plan:
        node.rounds.faults = NodeFaults(plan, node.communication, lambda index: send(FaultDue(node.uid, index)))


def activate_faults(node: Node, task: Task) -> None:
    """Activates the faults of a node that has joined. Faults of rounds that an earlier process of the node made, in
    this run or in the one it is resumed from, are not repeated."""
    if node.rounds.faults is not None:
        is_rejoining = task.join or task.resume is not None
        node.rounds.faults.begin(clock.now() if task.began is None else task.began, is_rejoining)


def run_task(task: Task, channel: Pipe) -> int:
    """Runs a forked node from its start to its end. Returns the exit code. Blocking; never raises."""
    commands = Commands(channel, task.join)
    return run_node(task, Link(channel.send, commands.attach, commands.peers))


@dataclass(frozen=True)
class Link:
    """The connection of a node to the program that started it."""

    send: Callable[[ChildMessage], None]
    """Sends a message without waiting. Raises OSError if the receiver is gone."""
    attach: Callable[[Node], None]
    """Is called with the node as soon as it can be stopped."""
    peers: Callable[[], dict[str, list[str]]]
    """Waits for the uid -> [control, bulk] endpoints of the nodes on this machine and returns them."""


def run_node(task: Task, link: Link, newcomer: Newcomer | None = None) -> int:
    """Runs node `task.uids[0]` to its end and reports through `link`. Returns the exit code. Blocking; never raises.
    newcomer: the place that the run granted, for a node that is in no mapping."""
    uid, node, reporter, send = task.uids[0], None, None, link.send
    records: NodeRecords | None = None
    try:
        set_up(task, uid)
        experiment = load_request(task.request, check=False)
        if newcomer is not None:
            experiment.seat(newcomer)
        logs.set_level(experiment.run.log_level)
        apply_cudnn_settings(experiment.training)
        folder = node_dir(task.run_dir, uid) if task.run_dir else None
        reporter = Reporter(uid, folder / "metrics.jsonl" if folder else None, send, task.progress_seconds)
        node = build(experiment, uid, transport_maker(experiment, task, uid), reporter.record)
        experiment.forget_data()
        records = NodeRecords([node], task.run_dir, resolve_recording(experiment), experiment.run)
        attach(node, experiment, task, reporter)
        attach_faults(node, experiment, send)
        release_freed_memory()
        _join(node, experiment, task, link)
        records.joined(uid)
        activate_faults(node, task)
        node.run()
        if node.checkpoints is not None:
            node.checkpoints.close(node.communication.config.timeout_seconds)
        if task.run_dir:
            save_node(node, Path(task.run_dir))
        node.communication.close()
        if node.rounds.faults is not None:
            node.rounds.faults.close()
        reporter.close()
        stopped = not node.over and not node.left
        records.over(node, stopped)
        records.close()
        reports = {str(other): figures for other, figures in node.reports.items()}
        send(Finished(uid, node.figures(), stopped, reports, local_modules(), node.left))
        return Interrupted.exit_code if stopped else 0
    except BaseException as error:
        if records is not None:
            records.failed(uid, error)
            records.close()
        return _fail(uid, error, node, reporter, send)


def set_up(task: Task, uid: int) -> None:
    """Sets the threads, the limit of open files, the log file and the crash traceback of this process."""
    raise_open_files_limit()
    keep_freed_memory()  # for a node in the foreground; a forked one inherits the setting from the fork server
    torch.set_num_threads(task.threads)
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    faulthandler.enable(sys.__stderr__ or 2)
    if task.run_dir:
        logs.set_up(f"node {uid:03d}", node_dir(task.run_dir, uid) / "log.txt")


def release_freed_memory() -> None:
    """Returns to the system the memory that was freed after reading the data. Memory freed later is kept for reuse
    (see forkserver.MALLOC)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _join(node: Node, experiment: Experiment, task: Task, link: Link) -> None:
    """Opens the node's sockets, receives the endpoints of the others and connects to all. Blocking. Raises
    AssemblyError and the errors of `Link.peers`."""
    transport, send = node.communication, link.send
    if threading.current_thread() is threading.main_thread():
        on_termination(node.ask_leave if experiment.newcomer else termination_handler(send, node))
    bound = transport.bind()
    if bound is not None:
        send(Bound(node.uid, *bound))
        endpoints = remote_endpoints(experiment, task.machine)
        endpoints |= {int(uid): (c, b) for uid, (c, b) in link.peers().items()}
        transport.set_peers(endpoints)
    if task.join:
        transport.join()  # before `attach`: failures of other nodes do not concern this one until it is admitted
        link.attach(node)
        send(NodeJoined(node.uid))
        return
    link.attach(node)
    joined = threading.Event()
    if node.uid == 0:
        threading.Thread(target=report_absent_nodes, args=(transport, send, joined), daemon=True).start()
    started = clock.now()
    try:
        transport.start(transport.config.start_timeout_seconds)
    finally:
        joined.set()
    logger.info("joined after %.2f s; %d samples", clock.now() - started, node.training.num_samples)
    send(NodeJoined(node.uid))


def termination_handler(send: Callable[[ChildMessage], None], *nodes: Node) -> Callable[[], None]:
    """Returns the SIGTERM handler of the nodes' process. It stops the nodes at once; nodes with checkpoints only after
    FORCED_STOP_SECONDS, if the supervisor has not stopped them all before the same round by then."""

    def stop() -> None:
        for node in nodes:
            node.ask_stop()

    def tell() -> None:
        with contextlib.suppress(OSError):
            send(Terminated(nodes[0].uid))

    def later() -> None:
        # not in the handler itself: the signal may have interrupted code that holds the pipe's lock while it sends
        for seconds, act in ((REPORT_TERMINATION_SECONDS, tell), (FORCED_STOP_SECONDS, stop)):
            timer = threading.Timer(seconds, act)
            timer.daemon = True
            timer.start()

    return stop if nodes[0].checkpoints is None else later


def report_absent_nodes(
    transport: Communication, send: Callable[[ChildMessage], None], joined: threading.Event
) -> None:
    """Reports the nodes that are not connected yet to the supervisor every ABSENT_SECONDS, until `joined` is set.
    Blocking."""
    while not joined.wait(ABSENT_SECONDS):
        with contextlib.suppress(OSError):
            send(NodesAbsent(list(transport.absent), {str(uid): why for uid, why in transport.refusals.items()}))


def _fail(
    uid: int, error: BaseException, node: Node | None, reporter: Reporter | None, send: Callable[[ChildMessage], None]
) -> int:
    """Reports a failure to the supervisor, then to the log and the other nodes. Returns the exit code."""
    failed = describe_failure(uid, error)
    with contextlib.suppress(OSError):
        send(failed)
    close_failed_node(failed, error, node, reporter)
    return failed.exit_code


def close_failed_node(failed: Failed, error: BaseException, node: Node | None, reporter: Reporter | None) -> None:
    """Reports a node's failure to the log and the other nodes, and closes the node's sockets and files. Blocking for
    some seconds."""
    cause = error.__cause__ if isinstance(error, DecentnodeError) else None  # e.g. an exception of the user's own code
    logger.error("%s", failed.text, exc_info=cause)
    with contextlib.suppress(Exception):
        if node is not None:
            if not failed.follower:
                if failed.ends_run:  # else those of this machine might meanwhile agree to continue without this node
                    clock.sleep(SUPERVISOR_SECONDS)
                node.communication.fail(failed.uid, failed.title)
            node.communication.close()
        if node is not None and node.checkpoints is not None:
            node.checkpoints.close(CLOSE_SECONDS)
        if reporter is not None:
            reporter.close()
    traceback.print_exception(error)  # last: a node in the foreground may have lost its terminal, and this then fails


def describe_failure(uid: int, error: BaseException) -> Failed:
    """Returns the report of an exception: its message if that is meant for users, else the whole traceback."""
    if isinstance(error, DecentnodeError):
        return Failed(uid, error.exit_code, str(error).partition("\n")[0], str(error), isinstance(error, PeerLost),
                      gave_up=isinstance(error, NoGeneration))  # fmt: skip
    if isinstance(error, OSError) and error.filename is not None:
        fault = EnvironmentFault(f"node {uid}: {error.filename}: {error.strerror}")
        return Failed(uid, fault.exit_code, str(fault), str(fault))
    last = traceback.format_exception_only(error)[-1].strip()
    return Failed(uid, NodeFailed.exit_code, last, "".join(traceback.format_exception(error)))
