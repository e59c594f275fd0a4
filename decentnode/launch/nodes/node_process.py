"""One node in its own process: build it, open its sockets, learn those of the others, join, run, save."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import queue
import resource
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
from decentnode.faults import OnLinks
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
from decentnode.launch.files.node_files import NodeRecords, Reporter, recorded, save_node
from decentnode.launch.files.resume import attach
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.loading import load_request
from decentnode.mapping.hosts import endpoint
from decentnode.mapping.newcomer import Newcomer, machine_of
from decentnode.node.faults import NodeFaults
from decentnode.node.node import Node
from decentnode.tensors import keep_freed_memory
from decentnode.training.cudnn import take_cudnn
from decentnode.wire.messages import MAX_CONFIG_BYTES
from decentnode.wire.orders import Action

logger = logging.getLogger(__name__)

PEERS_SECONDS = 300.0
"""Longest wait for the supervisor to name the other local nodes; the supervisor gives up first."""
ABSENT_SECONDS = 1.0
TOLD_SECONDS = 3.0
"""A scheduler ends a run by SIGTERM to all of its processes, and the supervisor then has nodes with checkpoints stop
before the same round. After so long they ask it to, as it may have got none itself."""
OBEYED_SECONDS = 20.0
"""After so long nodes with checkpoints stop without the supervisor: a scheduler kills after 30 s (Slurm, Kubernetes).
"""
CLOSE_SECONDS = 2.0
"""After a failure: how long a checkpoint may still be written; the supervisor ends the process soon after."""


class Commands:
    """Receives the supervisor's messages, in a thread of its own. The process ends when the supervisor is gone."""

    def __init__(self, channel: Pipe, join: bool) -> None:
        """join: whether the node comes to a run that has begun. Failures of other nodes before it is admitted do not
        concern it."""
        self._channel, self._join = channel, join
        self._peers: queue.SimpleQueue[Peers | PeerFailure | StopRun] = queue.SimpleQueue()
        self._nodes: dict[int, Node] = {}
        self._early: list[PeerFailure | StopRun] = []
        """What has come so far, for nodes that are attached later."""
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
                    self._early.append(message)
                for node in self._nodes.values():
                    self._obey(node, message)
                if isinstance(message, OrderRun) and self._nodes:
                    self._nodes[min(self._nodes)].order(cast(Action, message.action))
                if isinstance(message, LeaveRun):
                    self._leave(message)

    def _leave(self, asked: LeaveRun) -> None:
        """Have a node leave, or say why it stays. A full pipe costs the answer alone."""
        node = self._nodes.get(asked.uid)
        refusal = "it does not take part in any round yet" if node is None else node.refusal_to_leave(asked.others)
        if node is not None and not refusal:
            node.ask_leave()
        with contextlib.suppress(OSError):
            self._channel.send(LeaveAnswer(asked.uid, refusal))

    @staticmethod
    def _obey(node: Node, message: ChildMessage) -> None:
        if isinstance(message, StopRun):
            node.ask_stop()
        elif isinstance(message, PeerFailure) and message.uid != node.uid:
            node.communication.fail(message.uid, message.reason)

    def attach(self, node: Node) -> None:
        """Pass stops and failures to the node from now on, and those that came before."""
        with self._lock:
            self._nodes[node.uid] = node
            for message in self._early:
                self._obey(node, message)

    def detach(self, uid: int) -> None:
        """Pass nothing more to this node, which has ended."""
        with self._lock:
            self._nodes.pop(uid, None)

    def peers(self) -> dict[str, list[str]]:
        """Wait for the endpoints of the local nodes: uid -> [control, bulk]. Blocking. Raises PeerLost when one of them
        failed, Interrupted, NodeFailed after PEERS_SECONDS."""
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


def bind_plan(experiment: Experiment, uid: int, socket_dir: str, again: Sequence[str] = ()) -> BindPlan:
    """Returns where a node listens: at Unix sockets for the same machine unless tcp is asked for, and at tcp ports for
    others or where the mapping has a port. again: where it listened before it was started again."""
    place = experiment.make_mapping().place(uid)
    ipc = Path(socket_dir) if experiment.communication.unix_sockets and socket_dir else None
    return BindPlan(ipc_dir=ipc, host=place.bind, port=place.port, again=tuple(again))


def transport_maker(
    experiment: Experiment, task: Task, uid: int, process: SharedProcess | None = None,
    digests: Digests | None = None,
) -> Callable[[tuple[Schema, ...]], Communication]:
    """Returns a function that makes the node's transport from the schemas of its sharing rule. process: what it shares
    with others of this process. digests: the experiment's, where they are known: to find them takes milliseconds."""
    mapping = experiment.make_mapping()
    config = experiment.communication
    transport: type[Communication] = load_class(config.name, COMMUNICATIONS, "communication")
    device = device_of(mapping.place(uid).device, mapping.place(uid).rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def make(schemas: tuple[Schema, ...]) -> Communication:
        found = digests or experiment.digests()
        return transport.make(config, TransportParts(
            uid=uid, schemas=schemas, digest=found.whole, sections=found.sections, base_dir=experiment.base_dir,
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
    """Returns what a transport must know of nodes that are not in the mapping; None where there can be none. Raises
    UsageError where the experiment is too long to be told to them."""
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
    """Returns what goes wrong between nodes; None where nothing does."""
    plan = experiment.make_faults()
    between = any(isinstance(fault, OnLinks) for fault in plan)
    return LinkFaults(plan, experiment.seed) if between else None


def give_faults(node: Node, experiment: Experiment, send: Callable[[ChildMessage], None]) -> None:
    """Have the faults of the experiment strike this node, once `node.rounds.faults.begin` was called."""
    plan = experiment.make_faults()
    if plan:
        node.rounds.faults = NodeFaults(plan, node.communication, lambda index: send(FaultDue(node.uid, index)))


def begin_faults(node: Node, task: Task) -> None:
    """The node has joined: from now on the faults of the experiment strike it. Those of rounds that an earlier process
    made, also one of the run that this one goes on from, are over."""
    if node.rounds.faults is not None:
        again = task.join or task.resume is not None
        node.rounds.faults.begin(clock.now() if task.began is None else task.began, again)


def run_task(task: Task, channel: Pipe) -> int:
    """Run a forked node from its start to its end. Returns the exit code."""
    commands = Commands(channel, task.join)
    return run_node(task, Link(channel.send, commands.attach, commands.peers))


@dataclass(frozen=True)
class Link:
    """The connection of a node to the program that started it."""

    send: Callable[[ChildMessage], None]
    """Takes a message without waiting. Raises OSError when the receiver is gone."""
    attach: Callable[[Node], None]
    """Takes the node, once it can be stopped."""
    peers: Callable[[], dict[str, list[str]]]
    """Waits for, and returns, uid -> [control, bulk] endpoints of the nodes on this machine."""


def run_node(task: Task, link: Link, newcomer: Newcomer | None = None) -> int:
    """Run `task.uids[0]` to its end and report it through `link`. Returns the exit code. Blocking; never raises.
    newcomer: of a node that is in no mapping."""
    uid, node, reporter, send = task.uids[0], None, None, link.send
    records: NodeRecords | None = None
    try:
        set_up(task, uid)
        experiment = load_request(task.request, check=False)
        if newcomer is not None:
            experiment.seat(newcomer)
        logs.set_level(experiment.run.log_level)
        take_cudnn(experiment.training)
        folder = node_dir(task.run_dir, uid) if task.run_dir else None
        reporter = Reporter(uid, folder / "metrics.jsonl" if folder else None, send, task.progress_seconds)
        node = build(experiment, uid, transport_maker(experiment, task, uid), reporter.record)
        experiment.forget_data()
        records = NodeRecords([node], task.run_dir, recorded(experiment), experiment.run)
        attach(node, experiment, task, reporter)
        give_faults(node, experiment, send)
        give_back_memory()
        _join(node, experiment, task, link)
        records.joined(uid)
        begin_faults(node, task)
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
    """Set threads, the number of files, the log file and the traceback of a crash, for this process."""
    allow_files()
    keep_freed_memory()  # for a node in the foreground; a forked one has it from the server's environment
    torch.set_num_threads(task.threads)
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    faulthandler.enable(sys.__stderr__ or 2)
    if task.run_dir:
        logs.set_up(f"node {uid:03d}", node_dir(task.run_dir, uid) / "log.txt")


def allow_files() -> None:
    """Let this process have as many open files, sockets among them, as the system allows: many systems give 1,024 at
    first. A node has some 30, and one for every stranger that connects to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_back_memory() -> None:
    """Return memory that reading the data left free to the system. Later freed memory is kept (see
    forkserver.MALLOC)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _join(node: Node, experiment: Experiment, task: Task, link: Link) -> None:
    """Open the node's sockets, learn those of the others, and connect to all. Blocking. Raises AssemblyError and the
    errors of `Link.peers`."""
    transport, send = node.communication, link.send
    if threading.current_thread() is threading.main_thread():
        on_termination(node.ask_leave if experiment.newcomer else stopping(send, node))
    bound = transport.bind()
    if bound is not None:
        send(Bound(node.uid, *bound))
        endpoints = remote_endpoints(experiment, task.machine)
        endpoints |= {int(uid): (c, b) for uid, (c, b) in link.peers().items()}
        transport.set_peers(endpoints)
    if task.join:
        transport.join()  # before `attach`: until then a failure of another node does not concern this one
        link.attach(node)
        send(NodeJoined(node.uid))
        return
    link.attach(node)
    joined = threading.Event()
    if node.uid == 0:
        threading.Thread(target=tell_absent, args=(transport, send, joined), daemon=True).start()
    started = clock.now()
    try:
        transport.start(transport.config.start_timeout_seconds)
    finally:
        joined.set()
    logger.info("joined after %.2f s; %d samples", clock.now() - started, node.training.num_samples)
    send(NodeJoined(node.uid))


def stopping(send: Callable[[ChildMessage], None], *nodes: Node) -> Callable[[], None]:
    """Returns what SIGTERM calls in the nodes' process: it stops them, with checkpoints only where the supervisor has
    not done so within OBEYED_SECONDS."""

    def stop() -> None:
        for node in nodes:
            node.ask_stop()

    def tell() -> None:
        with contextlib.suppress(OSError):
            send(Terminated(nodes[0].uid))

    def later() -> None:
        for seconds, act in ((TOLD_SECONDS, tell), (OBEYED_SECONDS, stop)):  # not here: what the signal broke into may
            timer = threading.Timer(seconds, act)  # be sending
            timer.daemon = True
            timer.start()

    return stop if nodes[0].checkpoints is None else later


def tell_absent(transport: Communication, send: Callable[[ChildMessage], None], joined: threading.Event) -> None:
    """Tell the supervisor now and then who has not joined, until `joined`. Blocking."""
    while not joined.wait(ABSENT_SECONDS):
        with contextlib.suppress(OSError):
            send(NodesAbsent(list(transport.absent), {str(uid): why for uid, why in transport.refusals.items()}))


def _fail(
    uid: int, error: BaseException, node: Node | None, reporter: Reporter | None, send: Callable[[ChildMessage], None]
) -> int:
    """Tell the supervisor first, then the other nodes, then the log."""
    failed = describe_failure(uid, error)
    with contextlib.suppress(OSError):
        send(failed)
    let_go(failed, error, node, reporter)
    return failed.exit_code


def let_go(failed: Failed, error: BaseException, node: Node | None, reporter: Reporter | None) -> None:
    """Tell the log and the other nodes that a node failed, and let go of its sockets and files. Blocking for some
    seconds."""
    cause = error.__cause__ if isinstance(error, DecentnodeError) else None  # such as what the user's own code raised
    logger.error("%s", failed.text, exc_info=cause)
    with contextlib.suppress(Exception):
        if node is not None:
            if not failed.follower:
                node.communication.fail(failed.uid, failed.title)
            node.communication.close()
        if node is not None and node.checkpoints is not None:
            node.checkpoints.close(CLOSE_SECONDS)
        if reporter is not None:
            reporter.close()
    traceback.print_exception(error)  # last: the terminal of a node in the foreground may take none


def describe_failure(uid: int, error: BaseException) -> Failed:
    """Returns the report of an exception: its message if it was written for users, else the whole traceback."""
    if isinstance(error, DecentnodeError):
        return Failed(uid, error.exit_code, str(error).partition("\n")[0], str(error), isinstance(error, PeerLost),
                      gave_up=isinstance(error, NoGeneration))  # fmt: skip
    if isinstance(error, OSError) and error.filename is not None:
        fault = EnvironmentFault(f"node {uid}: {error.filename}: {error.strerror}")
        return Failed(uid, fault.exit_code, str(fault), str(fault))
    last = traceback.format_exception_only(error)[-1].strip()
    return Failed(uid, NodeFailed.exit_code, last, "".join(traceback.format_exception(error)))
