"""The process of one point of a sweep: it runs the point, reports its progress to the sweep and writes its outcome."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from decentnode import clock
from decentnode.launch.children.messages import Facts, Failed, Progress, Request
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.children.signals import keep_sigterm
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervising import entry

if TYPE_CHECKING:
    from decentnode.launch.reporting.outcome import Outcome as RunOutcome
    from decentnode.sweeps.store import Outcome

By = Literal["simulate", "processes"]
"""How a point is run: all its nodes are stepped in one process (simulate), or every node has a process (processes)."""
PROGRESS_SECONDS = 0.5
"""Minimum time between two progress messages of a point."""
INTERRUPTED = 130
"""Exit code of a process that was asked to stop before its point had finished."""


@dataclass(frozen=True)
class PointTask:
    """The work of one child process."""

    request: Request
    name: str
    """Name of the experiment."""
    folder: str
    """Folder of the point."""
    by: By
    resume: str = ""
    """The run from whose checkpoints the point resumes when it has none of its own; "" for none."""
    every_model: bool = False
    """Whether the models of the single nodes are kept; otherwise only the merged model is."""


def main(task: PointTask, connection: Connection) -> None:
    """Entry point of the child process."""
    entry.protect()
    keep_sigterm()
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the sweep alone, which asks its points to stop
    entry.apply_environment(task.request)
    entry.redirect_output(Path(task.folder) / "stderr.txt")
    entry.leave(lambda channel: _run_and_write_outcome(task, channel), connection)


def _run_and_write_outcome(task: PointTask, channel: Pipe) -> int:
    from decentnode.errors import DecentnodeError, Interrupted
    from decentnode.sweeps.store import write_outcome

    started, folder = clock.now(), Path(task.folder)
    try:
        run_outcome = _run_or_resume(task, channel)
    except Interrupted:
        return INTERRUPTED
    except DecentnodeError as error:
        title = str(error).strip().splitlines()[0]
        outcome = _failure_outcome(folder, None, Failed(-1, error.exit_code, title, str(error)))
    except Exception as error:
        from decentnode.launch.nodes.node_process import describe_failure

        outcome = _failure_outcome(folder, None, describe_failure(-1, error))
    else:
        if run_outcome.exit_code > 128:
            return INTERRUPTED
        outcome = _outcome_of_run(task, folder, run_outcome)
    outcome = replace(outcome, seconds=clock.now() - started)
    write_outcome(folder, outcome)
    return 0


def _run_or_resume(task: PointTask, channel: Pipe) -> RunOutcome:
    """Runs the point: from its own newest checkpoint if it has one, else from that of `task.resume`, else from the
    start."""
    from decentnode.errors import CheckpointError
    from decentnode.sweeps.store import has_checkpoints

    candidates = [""] if has_checkpoints(Path(task.folder) / task.name) else []
    for resume in (*candidates, *filter(None, [task.resume])):
        try:
            return _run_from(task, resume, channel)
        except CheckpointError:
            continue
    return _run_from(task, None, channel)


def _run_from(task: PointTask, resume: str | None, channel: Pipe) -> RunOutcome:
    request = replace(task.request, overrides=[*task.request.overrides, f"run.dir={json.dumps(task.folder)}"],
                      resume=resume)  # fmt: skip
    observer = ProgressReporter(channel)
    if task.by == "processes":
        from decentnode.launch.supervisor import supervise

        return supervise(request, observer, command="decentnode sweep")
    import torch

    from decentnode.launch.calling_process import run_in_calling_process

    # One thread, whatever else runs: sums over several threads may differ from those of one thread in their last bits
    torch.set_num_threads(1)
    here = replace(request, in_process=True, simulate=True)
    return run_in_calling_process(here, observer, command="decentnode sweep")


def _outcome_of_run(task: PointTask, folder: Path, run_outcome: RunOutcome) -> Outcome:
    from decentnode.sweeps.store import Outcome, remove_node_models

    assert run_outcome.run_dir is not None
    if not task.every_model:
        remove_node_models(run_outcome.run_dir)
    if run_outcome.exit_code:
        failure = run_outcome.failure or Failed(-1, run_outcome.exit_code, "the run failed", "")
        return _failure_outcome(folder, run_outcome.run_dir, failure)
    return Outcome("finished", _relative(folder, run_outcome.run_dir))


def _failure_outcome(folder: Path, run: Path | None, failed: Failed) -> Outcome:
    from decentnode.errors import Diverged
    from decentnode.sweeps.store import Outcome

    prefix = f"node {failed.uid}: " if failed.uid >= 0 and not failed.title.startswith("node ") else ""
    status: Literal["diverged", "failed"] = "diverged" if failed.exit_code == Diverged.exit_code else "failed"
    return Outcome(status, _relative(folder, run) if run else "", f"{prefix}{failed.title}", failed.exit_code)


def _relative(folder: Path, run: Path) -> str:
    return os.path.relpath(os.path.realpath(run), os.path.realpath(folder))


class ProgressReporter(Observer):
    """Reports the progress of the point to the sweep."""

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel
        self._progress: Any = None
        self._sent_at = clock.now() - PROGRESS_SECONDS

    def facts(self, facts: Facts, run_dir: Path | None) -> None:  # noqa: ARG002
        from decentnode.report.reading.measured import metrics_of_summary
        from decentnode.report.reading.progress import RunProgress

        measured = metrics_of_summary({"task": facts.task})
        self._progress = RunProgress.of(facts.rounds, facts.local, facts.evaluate_every, measured, facts.own_rounds)
        self._send_progress()

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        if self._progress.update(uid, record):
            self._send_progress()

    def tick(self) -> None:
        if self._progress is not None and clock.now() - self._sent_at >= PROGRESS_SECONDS:
            self._send_progress()

    def _send_progress(self) -> None:
        self._sent_at = clock.now()
        progress = self._progress
        main = progress.measured.main
        try:
            self._channel.send(Progress(-1, {"round": progress.round, "of": progress.rounds, "metric": main.text,
                                             "value": progress.latest.get(f"{main.name}_mean")}))  # fmt: skip
        except OSError:  # the sweep was killed: this point ends too, without an outcome
            os._exit(1)
