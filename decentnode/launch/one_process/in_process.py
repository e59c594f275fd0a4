"""Runs all nodes in one process, stepped in uid order: for dry runs, `communication: inproc` and simulations."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from decentnode import logs
from decentnode.build import build_in_process
from decentnode.communication.inproc import Inproc
from decentnode.errors import Interrupted
from decentnode.experiment import Experiment
from decentnode.launch.children.messages import ChildMessage, Engine, Finished, NodeJoined, OrderRun, StopRun, Task
from decentnode.launch.children.own_modules import local_modules
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.children.signals import on_termination
from decentnode.launch.files.node_files import NodeRecords, Reporter, errors_attributed_to, resolve_recording, save_node
from decentnode.launch.files.resume import attach
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.loading import load_request
from decentnode.launch.nodes.node_process import activate_faults, attach_faults, describe_failure, set_up
from decentnode.launch.one_process.batched_run import BatchedOutput, Stoppable, run_batched
from decentnode.launch.one_process.world_run import needs_world, run_in_world
from decentnode.metrics.figures import VIRTUAL
from decentnode.node.faults import NodeFaults
from decentnode.node.node import Node
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.simulate.asynchronous_rounds import AsynchronousRounds, check_schedule
from decentnode.simulate.engines.choice import choose
from decentnode.simulate.virtual import VirtualTime, is_described, make_clock
from decentnode.training.cudnn import apply_cudnn_settings
from decentnode.wire.orders import Action


def run_in_process(
    experiment: Experiment, record: Callable[[int, dict[str, Any]], None] = lambda _uid, _record: None,
    ready: Callable[[list[Node]], None] = lambda _: None, tick: Callable[[], None] = lambda: None,
    own_rounds: AsynchronousRounds | None = None,
) -> list[Node]:
    """Builds all nodes, steps them to their end and returns them. Blocking; raises what a node raises, with the node's
    `uid` as an attribute.

    record: called with uid and record. ready: called with the nodes before the first step. tick: called after every
    step of a node. own_rounds: chooses the nodes to step next; without it, nodes are stepped in turn.
    """
    nodes = build_in_process(experiment, record, own_rounds)
    ready(nodes)
    runs = {node.uid: node.steps() for node in nodes}
    going = nodes
    while going:
        for node in going if own_rounds is None else own_rounds.turn(going):
            try:
                next(runs[node.uid])
            except StopIteration:
                del runs[node.uid]
                continue
            except Exception as error:
                error.__dict__.setdefault("uid", node.uid)
                raise
            tick()
        going = [node for node in going if node.uid in runs]
    return nodes


class StepwiseOutput:
    """Writes the files of all nodes of a task that one process steps: metrics, events, checkpoints and models."""

    def __init__(self, task: Task, experiment: Experiment, send: Callable[[ChildMessage], None]) -> None:
        self._task, self._experiment, self._send = task, experiment, send
        self.reporters: dict[int, Reporter] = {}
        self._records: NodeRecords | None = None
        self._node_faults: list[NodeFaults] = []

    def open(self) -> None:
        """Opens the metrics.jsonl of each node, before the nodes are built."""
        task = self._task
        for uid in task.uids:
            path = node_dir(task.run_dir, uid) / "metrics.jsonl" if task.run_dir else None
            self.reporters[uid] = Reporter(uid, path, self._send, task.progress_seconds)

    def begin(self, nodes: list[Node], ready: Callable[[Sequence[Stoppable]], None]) -> None:
        """Opens the other records, attaches checkpoints to resume from, and activates faults, before the first step.
        ready: called as soon as the nodes can be asked to stop."""
        task, experiment = self._task, self._experiment
        self._records = NodeRecords(nodes, task.run_dir, resolve_recording(experiment) is True, experiment.run)
        ready(nodes)
        for node in nodes:
            assert isinstance(node.communication, Inproc)
            node.communication.hub.run_id = bytes.fromhex(task.run_id)
            attach(node, experiment, task, self.reporters[node.uid])
            self._records.joined(node.uid)
            if not experiment.communication.networked:  # else it is a dry run
                attach_faults(node, experiment, self._send)
                activate_faults(node, task)
                self._node_faults.extend([node.rounds.faults] if node.rounds.faults is not None else [])
            self._send(NodeJoined(node.uid))

    def finish(self, node: Node, virtual: VirtualTime | AsynchronousRounds | None) -> None:
        """Writes a node's last checkpoint and its model, and reports its closing figures, after its last step."""
        assert self._records is not None
        if node.checkpoints is not None:
            node.checkpoints.close(node.communication.config.timeout_seconds)
        if self._task.run_dir:
            with errors_attributed_to(node.uid):
                save_node(node, Path(self._task.run_dir))
        self.reporters[node.uid].close()
        stopped = not node.over
        self._records.over(node, stopped)
        ended = {} if virtual is None else {VIRTUAL: virtual.ended(node.uid, node.round)}
        self._send(Finished(node.uid, {**node.figures(), **ended}, stopped, modules=local_modules()))

    def failed(self, error: BaseException) -> None:
        """Records that the nodes ended with this error."""
        if self._records is not None:
            self._records.failed(getattr(error, "uid", self._task.uids[0]), error)

    def close(self) -> None:
        for faults in self._node_faults:
            faults.close()
        if self._records is not None:
            self._records.close()
        for reporter in self.reporters.values():
            reporter.close()


def run_nodes(
    task: Task, experiment: Experiment, send: Callable[[ChildMessage], None],
    ready: Callable[[Sequence[Stoppable]], None] = lambda _: None, tick: Callable[[], None] = lambda: None,
) -> int:
    """Runs all nodes of a task to their end, saves their results and reports them through `send`. Returns the exit
    code. Blocking; raises what a node raises, with the node's `uid` as an attribute of the error."""
    logs.set_level(experiment.run.log_level)
    apply_cudnn_settings(experiment.training)
    if task.request.simulate and needs_world(experiment):
        torch.set_num_threads(task.threads)
        return run_in_world(task, experiment, send, ready, tick)
    virtual = _virtual_time(experiment) if task.request.simulate else None
    if task.request.simulate:
        choice = choose(experiment, resume=task.resume is not None)
        send(Engine(choice.name, choice.reason))
        if choice.batched is not None:
            assert not isinstance(virtual, AsynchronousRounds), "such schedules have no common rounds"
            return run_batched(choice.batched, BatchedOutput(choice.batched, task, send, tick, virtual), ready)
        torch.set_num_threads(task.threads)
    files = StepwiseOutput(task, experiment, send)

    def record(uid: int, found: dict[str, Any]) -> None:
        files.reporters[uid].record(found if virtual is None else virtual.add_virtual_time(uid, found))

    try:
        files.open()
        own_rounds = virtual if isinstance(virtual, AsynchronousRounds) else None
        nodes = run_in_process(experiment, record, lambda nodes: files.begin(nodes, ready), tick, own_rounds)
        for node in reversed(nodes):
            files.finish(node, virtual)
        return 0 if all(node.over for node in nodes) else Interrupted.exit_code
    except BaseException as error:
        files.failed(error)
        raise
    finally:
        files.close()


def _virtual_time(experiment: Experiment) -> VirtualTime | AsynchronousRounds | None:
    """Returns the virtual time of a simulation that describes computers or links, else None. Raises UsageError for a
    schedule without virtual time."""
    if not is_described(experiment):
        return None
    if SCHEDULES[experiment.node.schedule].asynchronous:
        check_schedule(experiment)
        return AsynchronousRounds(make_clock(experiment))
    return VirtualTime(make_clock(experiment))


def run_task(task: Task, channel: Pipe) -> int:
    """Runs all nodes of a task in a child process. Returns the exit code. Blocking; raises only OSError, if the
    supervisor is gone."""
    try:
        set_up(task, task.uids[0])
        channel.reserve_for(len(task.uids))

        def listen(nodes: Sequence[Stoppable]) -> None:
            threading.Thread(target=_listen, args=(channel, nodes), daemon=True).start()
            on_termination(nodes[0].ask_stop)

        return run_nodes(task, load_request(task.request, check=False), channel.send, listen)
    except BaseException as error:
        failed = describe_failure(getattr(error, "uid", task.uids[0]), error)
        channel.send(failed)
        return failed.exit_code


def _listen(channel: Pipe, nodes: Sequence[Stoppable]) -> None:
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError):
            os._exit(1)
        if isinstance(message, StopRun):
            nodes[0].ask_stop()
        elif isinstance(message, OrderRun):
            nodes[0].order(cast(Action, message.action))
