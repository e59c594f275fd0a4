"""Runs all nodes in the calling process: for experiments made of its objects, for debuggers, and where no process can
be started. Nodes are stepped in turn; files and return value are those of a run with processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from decentnode import clock, entropy, logs
from decentnode.errors import EnvironmentFault, Interrupted, UsageError
from decentnode.experiment.initial_model import preserve_generators
from decentnode.launch.children.messages import (
    ChildMessage,
    Engine,
    Facts,
    Failed,
    Finished,
    NodeJoined,
    Progress,
    Request,
    Task,
)
from decentnode.launch.children.own_modules import local_modules
from decentnode.launch.children.signals import StopSignals
from decentnode.launch.files.run_dir import Records, node_dir
from decentnode.launch.loading import load_request
from decentnode.launch.nodes.node_process import describe_failure
from decentnode.launch.one_process.batched_run import Stoppable
from decentnode.launch.one_process.in_process import run_nodes
from decentnode.launch.reporting.checked import check_run
from decentnode.launch.reporting.header import changed_code_warning, header
from decentnode.launch.reporting.observer import Observer, checkpoint_notice, engine_notice, resumed_notice
from decentnode.launch.reporting.outcome import Durations, Ledger, Outcome, finished_before, summary
from decentnode.launch.reporting.trackers import Trackers
from decentnode.launch.supervising.prepare import facts, resume_lines
from decentnode.training.cudnn import preserve_cudnn_settings

PROGRESS_SECONDS = 0.25
"""Least time between two progress reports of a node."""


class TwoStepSignals(StopSignals):
    """Signals of which the first asks the run to stop and the second raises KeyboardInterrupt in whatever code runs,
    because there is no other process that could kill this one."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        super()._on_signal(number, frame)
        if len(self.received) > 1:
            raise KeyboardInterrupt


def run_in_calling_process(
    request: Request, observer: Observer, *, command: str = "", started: float | None = None
) -> Outcome:
    """Runs all nodes in this process to the end. Blocking.

    Parameters and errors are as for `supervise`; the exception of a failed node is `Outcome.error`. Restores the state
    of torch's random generators and cuDNN settings.
    """
    started = clock.now() if started is None else started
    with TwoStepSignals() as signals:
        experiment = load_request(request)
        if experiment.faults and experiment.communication.networked:
            raise UsageError(f"{request.shown}: nodes in this process have neither processes nor connections for "
                             "faults to strike; use communication: inproc for slow, full_disk and clock_jump, or "
                             f"leave faults out")  # fmt: skip
        loaded = facts(experiment, replace(request, in_process=True))
        finished = finished_before(loaded, observer.notice)
        if finished is not None:
            return finished
        records = Records(loaded, request.shown, command)
        observer.facts(loaded, records.directory)
        shown_uids = loaded.local[:1] if request.simulate else loaded.local
        observer.header([*resume_lines(experiment, request), *header(experiment, shown_uids, not request.simulate),
                         *changed_code_warning(experiment)])
        run = _InProcessRun(loaded, records, observer, signals, started)
        experiment_dir = Path(request.config or "x").absolute().parent
        run.trackers = Trackers(loaded.trackers, records.directory, loaded.machine, experiment_dir, observer.notice)
        log = node_dir(records.directory, loaded.local[0]) / "log.txt"
        with logs.into(log, f"node {loaded.local[0]:03d}"), preserve_generators(), preserve_cudnn_settings():
            run.run(request, lambda task: run_nodes(task, experiment, run.on_message, run.begin, run.tick))
        return run.conclude()


class _InProcessRun:
    """The state of a run in this process: takes its nodes' messages and concludes it with an `Outcome`."""

    def __init__(
        self, facts: Facts, records: Records, observer: Observer, signals: StopSignals, started: float
    ) -> None:
        self.facts, self.records, self.observer, self.signals = facts, records, observer, signals
        self.started = started
        self.ledger = Ledger(records.directory)
        self.start_seconds: float | None = None
        self.error: BaseException | None = None
        self.trackers: Trackers | None = None
        self._nodes: Sequence[Stoppable] = []
        self._joined = 0
        self._stopping = False

    def run(self, request: Request, work: Callable[[Task], int]) -> None:
        """Calls `work` to run the nodes. Whatever it raises is kept as the run's failure or interruption."""
        local = list(self.facts.local)
        task = Task(
            request=request, uids=local, machine=self.facts.machine, run_dir=str(self.records.directory),
            threads=torch.get_num_threads(), run_id=entropy.word(8), in_process=True,
            progress_seconds=PROGRESS_SECONDS, socket_dir="", resume=self.facts.resume,
            resume_runs=self.facts.resume_runs,
        )  # fmt: skip
        try:
            work(task)
        except KeyboardInterrupt as error:
            self.error = error
        except Interrupted:
            pass
        except Exception as error:
            self.error = error
            failed = describe_failure(getattr(error, "uid", local[0]), error)
            self.ledger.failures.append(failed)
            self.observer.failed(failed, node_dir(self.records.directory, failed.uid))

    def begin(self, nodes: Sequence[Stoppable]) -> None:
        """Stores the nodes once they are built, so that they can be asked to stop."""
        self._nodes = nodes

    def on_message(self, message: ChildMessage) -> None:
        if isinstance(message, Progress):
            self.ledger.progress(message.uid, message.record)
            self.observer.progress(message.uid, message.record)
            if message.record.get("kind") == "resumed" and self.ledger.resumed is None:
                self.ledger.resumed = message.record
                self.observer.notice(resumed_notice(message.record))
            elif message.record.get("kind") == "checkpoint" and (
                notice := checkpoint_notice(message.uid, message.record, self.ledger.checkpoint_problems)
            ):
                self.observer.notice(notice)
        elif isinstance(message, NodeJoined):
            self._joined += 1
            if self._joined == len(self.facts.local):
                self.start_seconds = clock.now() - self.started
                self.observer.joined(self.start_seconds)
                self.records.keep_modules(local_modules())
                self.records.start()
        elif isinstance(message, Engine):
            self.ledger.engine = message
            self.observer.notice(engine_notice(message))
        elif isinstance(message, Finished):
            self.ledger.finished[message.uid] = message
            self.records.keep_modules(message.modules)

    def tick(self) -> None:
        """Handles received signals; called between the steps of nodes."""
        self.signals.clear()
        if self.signals.received and not self._stopping:
            self._stopping = True
            self.observer.stopping(signal.Signals(self.signals.received[0]).name)
            self._nodes[0].ask_stop()
        if self.signals.suspend_if_asked(self.observer.suspending):
            self.observer.resumed()
        if self.trackers is not None:
            self.trackers.tick()
        self.observer.tick()

    def conclude(self) -> Outcome:
        """Writes the summary and returns the outcome with the exit code."""
        checked = check_run(self.records.directory, self.facts, self.ledger, self.observer)
        cause: Failed | None = next(iter(self.ledger.failures), None)
        complete = self.ledger.finished.keys() >= {*self.facts.local} and not self.ledger.stopped
        if cause is not None:
            exit_code = cause.exit_code or 8
        elif complete:
            exit_code = 0
        else:
            exit_code = self.signals.exit_code if self.signals.received else Interrupted.exit_code
        durations = Durations(self.start_seconds, clock.now() - self.started)
        found = summary(self.facts, self.ledger, exit_code, self.records.directory, durations)
        if self.facts.faults:
            found["checked"] = checked
        if not self.records.finish(found, whole=True):
            exit_code = exit_code or EnvironmentFault.exit_code
        for notice in self.records.notices:
            self.observer.notice(notice)
        if self.trackers is not None:
            signals_before = len(self.signals.received)
            self.trackers.close(lambda: len(self.signals.received) > signals_before)
        return Outcome(exit_code, self.records.directory, found, cause, error=self.error)
