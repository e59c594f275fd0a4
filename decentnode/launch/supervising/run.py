"""Runs the supervisor's main loop: receives the messages of this machine's nodes, passes each to the part that handles
it, and concludes the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.errors import EnvironmentFault, Interrupted
from decentnode.launch.children.messages import (
    Bound,
    ChildMessage,
    Closed,
    Engine,
    Facts,
    Failed,
    FaultDue,
    Finished,
    Header,
    LeaveAnswer,
    NodeJoined,
    NodesAbsent,
    Peers,
    Progress,
    StopRun,
    Terminated,
)
from decentnode.launch.files.run_dir import Records, promote_merged_model
from decentnode.launch.reporting.checked import check_run
from decentnode.launch.reporting.observer import (
    apart_notice,
    checkpoint_notice,
    engine_notice,
    lacking_notice,
    names,
    objection_notice,
    resumed_notice,
)
from decentnode.launch.reporting.outcome import Durations, Ledger, Outcome, first_cause, summary
from decentnode.launch.reporting.trackers import Trackers
from decentnode.launch.supervising.controlling import OrderHandler
from decentnode.launch.supervising.deadlines import Deadlines
from decentnode.launch.supervising.early_end import EarlyEnd
from decentnode.launch.supervising.leaving import LeaveHandler
from decentnode.launch.supervising.local_nodes import LocalNodes
from decentnode.launch.supervising.local_run import Command, LocalRun
from decentnode.launch.supervising.lost_nodes import LostNodes
from decentnode.launch.supervising.process_faults import ProcessFaults
from decentnode.launch.supervising.workers import Context, Worker

TICK_SECONDS = 0.25


class Run:
    """The nodes of this machine, from their start until all are gone and the outcome is known."""

    def __init__(self, command: Command, facts: Facts, records: Records | None) -> None:
        """records: writes the run directory; None for a dry run, which writes nothing."""
        self.request = command.request
        self.facts = facts
        self.records = records
        self.directory = records.directory if records else None
        self.observer = command.observer
        self.signals = command.signals
        self.started = command.started
        self.ledger = Ledger(self.directory, facts.own_rounds)
        self.nodes = LocalNodes(self.request, facts, self.directory)
        self.start_seconds: float | None = None
        self._trackers: Trackers | None = None
        self._process_faults = ProcessFaults([] if self.request.simulate else facts.faults, facts.local, self.directory)
        self._leave_requests = LeaveHandler(facts, self.directory)
        self._orders = OrderHandler(self.directory)
        local = LocalRun(command, facts, self.nodes, self.ledger, self._process_faults)
        self._early_end = EarlyEnd(local)
        self._lost_nodes = LostNodes(local, self._early_end)
        self._deadlines = Deadlines(local, self._early_end, self._lost_nodes)

    # -- starting ---------------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        """Forks the local nodes and starts the trackers. Returns before they are ready."""
        experiment_dir = (Path(self.request.folder or ".") / self.request.config).absolute().parent
        self._trackers = Trackers(
            self.facts.trackers, self.directory, self.facts.machine, experiment_dir, self.observer.notice
        )
        self.nodes.start(context)

    def on_header(self, header: Header) -> None:
        self.observer.header(header.lines)
        if self.records is not None:
            self.records.keep_modules(header.modules)

    # -- the loop ---------------------------------------------------------------------------------------------

    def loop(self, poll: Callable[[], None]) -> None:
        """Handles the messages of the children until all have ended. Blocking; calls `poll` at least every
        TICK_SECONDS."""
        while any(worker.alive for worker in self.nodes.workers):
            sources = {self.signals.fileno(): None}
            for worker in self.nodes.workers:
                if worker.alive:
                    sources[worker.process.sentinel] = None
                if worker.open:
                    sources[worker.channel.connection.fileno()] = None
            timeout = min(TICK_SECONDS, max(0.0, self._process_faults.next_due_time - clock.now()))
            ready = set(wait(list(sources), timeout=timeout))
            self._process_faults.tick(clock.now(), self)
            self._leave_requests.tick(clock.now(), self)
            self._orders.tick(clock.now(), self)
            if self.signals.fileno() in ready:
                self.signals.clear()
            self._early_end.handle_signals()
            self._early_end.stop_once_paused(clock.now())
            # Starting nodes wait for the other nodes' addresses from this process: Ctrl-Z is put off until they have
            # them.
            if self.nodes.phase != "starting" and self.signals.suspend_if_asked(self.observer.suspending):
                self.observer.resumed()
                continue
            # All ended processes are collected before one is restarted: if the fork server dies, all nodes die at once.
            for worker in [worker for worker in self.nodes.workers if self._listen(worker, ready)]:
                self._lost_nodes.replace(worker)
            if self._early_end.kills_soon:
                self._early_end.tick(clock.now())
            else:
                self._deadlines.check(clock.now())
            poll()
            if self._trackers is not None:
                self._trackers.tick()
            self.observer.tick()

    def _listen(self, worker: Worker, ready: Collection[Any]) -> bool:
        """Handles the messages of a process. Returns whether it has ended since the last call."""
        if not worker.alive:
            return False
        has_ended = worker.process.sentinel in ready
        worker.channel.flush()
        for message in worker.messages():
            self._on_message(worker, message)
        if has_ended:
            worker.reap()
            self.nodes.remove_temporaries_of(worker)
            self._on_exit(worker)
        return has_ended

    def _on_message(self, worker: Worker, message: ChildMessage) -> None:
        if isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, Bound):
            self._on_bound(worker, message)
        elif isinstance(message, NodeJoined):
            worker.joined.add(message.uid)
            all_joined = all(len(worker.joined) >= len(worker.uids) for worker in self.nodes.workers)
            if all_joined and self.nodes.phase != "running":
                self._on_all_joined()
        elif isinstance(message, NodesAbsent):
            self._deadlines.absent = message
        elif isinstance(message, Engine):
            self.ledger.engine = message
            self.observer.notice(engine_notice(message))
        elif isinstance(message, FaultDue):
            self._process_faults.inject(message.uid, message.index, self)
        elif isinstance(message, Terminated):
            self._early_end.stop_after_round(f"node {message.uid} got SIGTERM")
        elif isinstance(message, LeaveAnswer):
            self._leave_requests.answered(message, self)
        elif isinstance(message, Finished):
            self._on_finished(worker, message)
        elif isinstance(message, Failed):
            self._leave_requests.ended(message)
            worker.failed.add(message.uid)
            worker.last_message_time = clock.now() if worker.is_done else None
            self._lost_nodes.died(message)
        elif isinstance(message, Closed) and not worker.is_done:
            self._lost_nodes.restart_separately(message.uid)

    def _on_progress(self, message: Progress) -> None:
        """Handles a record of a node's metrics.jsonl. Some kinds are events that the supervisor acts on."""
        self._deadlines.last_progress = clock.now()
        self.ledger.progress(message.uid, message.record)
        self.observer.progress(message.uid, message.record)
        self._early_end.take_record(message.uid, message.record)
        kind = message.record.get("kind")
        if kind == "generation":
            self._lost_nodes.generation(message.record)
        elif kind == "control" and not self._early_end.stop_requested:  # else it is a pause that only prepares the stop
            self._orders.report_executed(message.record, self)
        elif kind == "apart":
            self.observer.notice(apart_notice(message.record))
        elif kind == "lacking":
            self.observer.notice(lacking_notice(message.record))
        elif kind == "objection":
            self.observer.notice(objection_notice(message.record))
        elif kind == "resumed":
            self._on_resumed(message.uid, message.record)
        elif kind == "checkpoint" and (
            notice := checkpoint_notice(message.uid, message.record, self.ledger.checkpoint_problems)
        ):
            self.observer.notice(notice)

    def _on_bound(self, worker: Worker, message: Bound) -> None:
        """Stores the endpoints of a node. Once those of all nodes of this machine are known, they are sent to all; a
        restarted node gets them at once."""
        worker.bound.add(message.uid)
        self.nodes.endpoints[str(message.uid)] = [message.control, message.bulk]
        if self.nodes.phase == "running":
            worker.send(Peers(self.nodes.endpoints))
        elif len(self.nodes.endpoints) == len(self.facts.local):
            self.nodes.enter("joining")
            self.nodes.send_to_all(Peers(self.nodes.endpoints))

    def _on_finished(self, worker: Worker, message: Finished) -> None:
        """Handles a node's regular end: after its last round, after a stop, or because it was asked to leave."""
        self._leave_requests.ended(message)
        worker.finished.add(message.uid)
        if self.records is not None:
            self.records.keep_modules(message.modules)
        self.ledger.lost.pop(message.uid, None)
        if message.left:
            self._on_left(worker, message)
            return
        self._process_faults.stop()
        self.ledger.finished[message.uid] = message
        self._deadlines.first_finish = self._deadlines.first_finish or clock.now()
        worker.last_message_time = clock.now() if worker.is_done else None
        if message.stopped:
            # even if the stop was asked for on another machine: a node that is about to rejoin learns of it only here
            self.nodes.send_to_all(StopRun())

    def _on_left(self, worker: Worker, message: Finished) -> None:
        """Handles the end of a node that left gracefully, without ending the run: the others continue."""
        self.ledger.left[message.uid] = message
        worker.last_message_time = clock.now() if worker.is_done else None
        rounds = message.figures.get("rounds", 0)
        self.observer.notice(f"node {message.uid} left after round {rounds}: the others continue")

    def _on_all_joined(self) -> None:
        self.nodes.enter("running")
        self._process_faults.begin(clock.now())
        self.start_seconds = clock.now() - self.started
        (self.observer.asks_to_join if self.request.join else self.observer.joined)(self.start_seconds)
        if self.records is not None:
            self.records.start()

    def _on_exit(self, worker: Worker) -> None:
        if not worker.is_done and not self._early_end.kills_soon:
            lost = worker.unfinished[:1] if self.facts.in_process else worker.unfinished
            title = f"node {names(lost)} {worker.ending()}"
            worker.failed.update(worker.unfinished)
            for uid in lost:
                self._lost_nodes.died(Failed(uid, 8, title, title), is_reported=uid != lost[0])
        elif worker.finished.issuperset(worker.uids) and worker.exit_code not in (0, Interrupted.exit_code):
            uid = worker.uids[0]
            self._early_end.fail(Failed(uid, 8, f"node {uid} finished, then {worker.ending()}", ""))

    def _on_resumed(self, uid: int, record: Mapping[str, Any]) -> None:
        """Handles the report that a node resumed from a checkpoint. The observer is shown the first one, and every
        checkpoint that could not be used."""
        for problem in record.get("problems", []):
            self.observer.notice(f"node {uid}: {problem}")
        if self.ledger.resumed is None:
            self.ledger.resumed = record
            self.observer.notice(resumed_notice(record))

    # -- what injected faults and users' requests use (`Processes`, `ControlledRun`, `LeavingRun`) ----------------

    @property
    def phase(self) -> str:
        """As `ControlledRun.phase`."""
        return self.nodes.phase

    @property
    def present(self) -> list[Worker]:
        """As `ControlledRun.present`."""
        running = [worker for worker in self.nodes.workers if worker.alive and not worker.is_done]
        return [worker for worker in running if not self.ledger.lost.keys() >= {*worker.unfinished}]

    def worker_of(self, uid: int) -> Worker | None:
        """As `Processes.worker_of`."""
        return self.nodes.worker_of(uid)

    def restart_for_fault(self, uid: int) -> None:
        """As `Processes.restart_for_fault`."""
        self._lost_nodes.restart_for_fault(uid)

    def stop_after_round(self) -> bool:
        """As `ControlledRun.stop_after_round`."""
        return self._early_end.stop_after_round()

    def notice(self, text: str) -> None:
        """As `LeavingRun.notice`."""
        self.observer.notice(text)

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kills and reaps every child, and removes the socket folder. Idempotent."""
        self.nodes.close()
        self._leave_requests.close()
        self._orders.close()

    def conclude(self) -> Outcome:
        """Writes the summary and returns the outcome with the exit code. To be called after `close`."""
        checked, undue = None, self._process_faults.undue_notice(clock.now())
        if not self._early_end.killed_by_user:
            if undue and self.ledger.finished and self.directory is not None:
                self.observer.notice(undue)
            checked = check_run(self.directory, self.facts, self.ledger, self.observer)
        self._early_end.report_cause()
        if self.ledger.lost and not self.ledger.finished and not self.ledger.left:  # no node was left to continue
            lost = self.ledger.lost.values()
            self.ledger.failures += [failed for failed in lost if failed.exit_code != Interrupted.exit_code]
            self._early_end.report_cause()
        cause = first_cause(self.ledger.failures)
        exit_code = self._exit_code(cause)
        wall = clock.now() - self.started
        contents = summary(self.facts, self.ledger, exit_code, self.directory, Durations(self.start_seconds, wall))
        if self.facts.faults:
            reports = (each.injected_faults for each in self.ledger.finished.values())
            simulated = next((report for report in reports if report), {})
            contents |= {"process_faults": dict(self._process_faults.counts) or simulated, "checked": checked}
        if self.directory is not None and contents.get("members"):
            with contextlib.suppress(OSError):  # if it fails, the models stay where the nodes wrote them
                promote_merged_model(self.directory)
        if self.records is not None:
            whole = 0 in self.facts.local or any(finished.reports for finished in self.ledger.finished.values())
            if not self.records.finish(contents, whole):
                exit_code = exit_code or EnvironmentFault.exit_code
            for notice in self.records.notices:
                self.observer.notice(notice)
        if self._trackers is not None:
            signals_before = len(self.signals.received)
            self._trackers.close(lambda: self._early_end.killed_by_user or len(self.signals.received) > signals_before)
        followers = self.ledger.followers(self.facts.local, cause)
        return Outcome(exit_code, self.directory, contents, cause, followers, tuple(sorted(self._early_end.silent)))

    def _exit_code(self, cause: Failed | None) -> int:
        if self._early_end.killed_by_user:
            return self.signals.exit_code
        if cause is not None:
            return cause.exit_code or 8
        if self.ledger.done(self.facts.local):
            return 0
        return self.signals.exit_code if self.signals.received else 130
