"""Runs several nodes of a machine in one process: builds them one after the other, lets them join concurrently, and
steps them in turn."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from decentnode import clock, logs
from decentnode.build import build
from decentnode.communication.shared_process import SharedProcess
from decentnode.errors import Interrupted
from decentnode.experiment import Experiment
from decentnode.launch.children.messages import Bound, Closed, Failed, Finished, NodeJoined, Task
from decentnode.launch.children.own_modules import local_modules
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.children.signals import on_termination
from decentnode.launch.files.node_files import NodeRecords, Reporter, errors_attributed_to, resolve_recording, save_node
from decentnode.launch.files.resume import attach
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.loading import load_request
from decentnode.launch.nodes.node_process import (
    PEERS_SECONDS,
    Commands,
    activate_faults,
    attach_faults,
    close_failed_node,
    describe_failure,
    release_freed_memory,
    remote_endpoints,
    report_absent_nodes,
    set_up,
    termination_handler,
    transport_maker,
)
from decentnode.node.node import Node
from decentnode.node.stepping import Stepping
from decentnode.training.cudnn import apply_cudnn_settings

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 20.0
"""Longest wait, after all nodes of the process have ended, for their transports to notify the others and close their
sockets. Each takes a few seconds at most."""


FULL_RATE_NODES = 8
"""A process reports rounds to the supervisor at most as often as this many nodes in their own processes would: a report
takes tenths of a millisecond on either side, and nobody reads hundreds per second."""


@dataclass
class _HostedNode:
    """A node of this process and its state."""

    node: Node
    reporter: Reporter
    failed: Failed | None = None
    stopped: bool = False


def run_task(task: Task, channel: Pipe) -> int:
    """Runs all nodes of a task to their end and reports each to the supervisor. Returns the exit code. Blocking; never
    raises."""
    return _SeveralNodes(task, channel).run()


class _SeveralNodes:
    """The nodes of one process, from their start to their end."""

    def __init__(self, task: Task, channel: Pipe) -> None:
        self._task, self._channel, self._send = task, channel, channel.send
        self._commands = Commands(channel, task.join)
        self._process = SharedProcess(tuple(task.uids))
        self._hosted: dict[int, _HostedNode] = {}
        self._records: NodeRecords | None = None
        self._closing_threads: list[threading.Thread] = []
        """Threads in which the transports of ended nodes are closed."""

    def run(self) -> int:
        """Returns the exit code. Blocking; never raises."""
        try:
            experiment = self._prepare()
            self._build(experiment)
            self._join(experiment)
        except BaseException as error:
            self._fail_all(error)
        else:
            steps = {uid: each.node.steps() for uid, each in self._hosted.items() if each.failed is None}
            Stepping(self._process, steps, self._ended).run()
        return self._conclude()

    # -- the start --------------------------------------------------------------------------------------------

    def _prepare(self) -> Experiment:
        task = self._task
        set_up(task, task.uids[0])
        if task.run_dir:
            logs.set_up_nodes({uid: node_dir(task.run_dir, uid) / "log.txt" for uid in task.uids})
        experiment = load_request(task.request, check=False)
        logs.set_level(experiment.run.log_level)
        apply_cudnn_settings(experiment.training)
        return experiment

    def _build(self, experiment: Experiment) -> None:
        task, digests = self._task, experiment.digests()
        progress_seconds = task.progress_seconds * max(1.0, len(task.uids) / FULL_RATE_NODES)
        for uid in task.uids:
            folder = node_dir(task.run_dir, uid) if task.run_dir else None
            reporter = Reporter(uid, folder / "metrics.jsonl" if folder else None, self._send, progress_seconds)
            make = transport_maker(experiment, task, uid, self._process, digests)
            with logs.of_node(uid), errors_attributed_to(uid):
                self._hosted[uid] = _HostedNode(build(experiment, uid, make, reporter.record), reporter)
        experiment.forget_data()
        nodes = [each.node for each in self._hosted.values()]
        self._records = NodeRecords(nodes, task.run_dir, resolve_recording(experiment), experiment.run)
        for uid, each in self._hosted.items():
            with logs.of_node(uid), errors_attributed_to(uid):
                attach(each.node, experiment, task, each.reporter)
                attach_faults(each.node, experiment, self._send)
        release_freed_memory()

    def _join(self, experiment: Experiment) -> None:
        """Opens the sockets of all nodes, receives the endpoints of the others and connects. Blocking. A single node
        that cannot join is marked as failed; raises only what keeps all nodes from joining."""
        nodes = [each.node for each in self._hosted.values()]
        on_termination(termination_handler(self._send, *nodes))
        bound = []
        for node in nodes:
            with errors_attributed_to(node.uid):
                endpoints_here = node.communication.bind()
            assert endpoints_here is not None, "nodes of several processes listen"
            bound.append(Bound(node.uid, *endpoints_here))
        self._channel.send_all(bound, PEERS_SECONDS)
        endpoints = remote_endpoints(experiment, self._task.machine)
        endpoints |= {int(uid): (control, bulk) for uid, (control, bulk) in self._commands.peers().items()}
        for node in nodes:
            node.communication.set_peers(endpoints)
        joined = threading.Event()
        if 0 in self._hosted and not self._task.join:
            absent = (self._hosted[0].node.communication, self._send, joined)
            threading.Thread(target=report_absent_nodes, args=absent, daemon=True).start()
        try:
            run_concurrently([functools.partial(self._join_node, each) for each in self._hosted.values()])
        finally:
            joined.set()

    def _join_node(self, hosted: _HostedNode) -> None:
        """Joins one node, in its own thread, because joining blocks until the other nodes join."""
        node, started = hosted.node, clock.now()
        with logs.of_node(node.uid):
            try:
                if self._task.join:
                    node.communication.join()  # before `attach`: failures of others do not concern it until admission
                    self._commands.attach(node)
                else:
                    self._commands.attach(node)
                    node.communication.start(node.communication.config.start_timeout_seconds)
                    seconds = clock.now() - started
                    logger.info("joined after %.2f s; %d samples", seconds, node.training.num_samples)
            except BaseException as error:
                self._fail(hosted, error)
                return
            if self._records is not None:
                self._records.joined(node.uid)
            activate_faults(node, self._task)
            self._send(NodeJoined(node.uid))

    # -- the end ----------------------------------------------------------------------------------------------

    def _ended(self, uid: int, error: BaseException | None) -> None:
        """Saves the results of a node that was stepped to its end or raised `error`. Its transport, which takes a while
        to close, is closed in a thread, so that the other nodes are stepped meanwhile."""
        hosted = self._hosted[uid]
        node = hosted.node
        try:
            if error is not None:
                raise error
            if node.checkpoints is not None:
                node.checkpoints.close(node.communication.config.timeout_seconds)
            if self._task.run_dir:
                save_node(node, Path(self._task.run_dir))
        except BaseException as reason:
            self._fail(hosted, reason)
            return
        hosted.stopped = not node.over and not node.left
        self._commands.detach(uid)
        self._close_in_thread(uid, functools.partial(self._finish, hosted))

    def _finish(self, hosted: _HostedNode) -> None:
        node = hosted.node
        node.communication.close()
        hosted.reporter.close()
        assert self._records is not None, "made before the nodes join"
        self._records.over(node, hosted.stopped)
        reports = {str(other): figures for other, figures in node.reports.items()}
        with contextlib.suppress(OSError):
            self._send(Finished(node.uid, node.figures(), hosted.stopped, reports, local_modules(), node.left))

    def _fail(self, hosted: _HostedNode, error: BaseException) -> None:
        """Handles the failure of one node; the other nodes of the process continue."""
        node = hosted.node
        self._process.uids.discard(node.uid)
        self._commands.detach(node.uid)
        hosted.failed = describe_failure(node.uid, error)
        if self._records is not None:
            self._records.failed(node.uid, error, alone=True)
        failed = hosted.failed

        def leave() -> None:
            close_failed_node(failed, error, node, hosted.reporter)
            with contextlib.suppress(OSError):
                self._send(Closed(node.uid))

        with contextlib.suppress(OSError):
            self._send(failed)
        self._close_in_thread(node.uid, leave)

    def _fail_all(self, error: BaseException) -> None:
        """Reports that the process cannot run its nodes. The node that caused it is named if that is known."""
        cause = getattr(error, "uid", self._task.uids[0])
        failed = describe_failure(cause, error)
        for uid in (cause, *(each for each in self._task.uids if each != cause)):
            follower = Failed(uid, failed.exit_code, failed.title, failed.title, follower=True)
            result = failed if uid == cause else follower
            hosted = self._hosted.get(uid)
            with contextlib.suppress(OSError):
                self._send(result)
            if self._records is not None:
                self._records.failed(uid, error, alone=True)
            if hosted is not None and hosted.failed is None:
                hosted.failed = result
                close = functools.partial(close_failed_node, result, error, hosted.node, hosted.reporter)
                self._close_in_thread(uid, close)
        if cause not in self._hosted:
            logger.error("%s", failed.text)
        self._start_exit_code = failed.exit_code

    def _close_in_thread(self, uid: int, work: Callable[[], None]) -> None:
        def run() -> None:
            with logs.of_node(uid):
                work()

        thread = threading.Thread(target=run, name=f"leave-{uid}", daemon=True)
        self._closing_threads.append(thread)
        thread.start()

    _start_exit_code = 0
    """Exit code of the failure that kept all nodes from starting."""

    def _conclude(self) -> int:
        deadline = clock.now() + LEAVE_SECONDS
        for thread in self._closing_threads:
            thread.join(max(0.0, deadline - clock.now()))
        if self._records is not None:
            self._records.close()
        self._process.close()
        codes = [each.failed.exit_code for each in self._hosted.values() if each.failed is not None]
        stopped = any(each.stopped for each in self._hosted.values())
        return self._start_exit_code or next(iter(codes), Interrupted.exit_code if stopped else 0)


def run_concurrently(works: Sequence[Callable[[], None]]) -> None:
    """Runs the functions concurrently, each in its own thread. Blocking until all have returned; none may raise."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
