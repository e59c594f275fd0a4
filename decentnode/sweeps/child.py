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
from decentnode.launch.children.signals import note_termination
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervising import entry

if TYPE_CHECKING:
    from decentnode.launch.reporting.outcome import Outcome as RunOutcome
    from decentnode.sweeps.store import Outcome

By = Literal["simulate", "processes"]
"""How a point is run: all its nodes are stepped in one process (simulate), or every node has a process (processes)."""
TELL_SECONDS = 0.5
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
    note_termination()
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the sweep alone, which asks its points to stop
    entry.surround(task.request)
    entry.redirect_output(Path(task.folder) / "stderr.txt")
    entry.leave(lambda channel: _work(task, channel), connection)


def _work(task: PointTask, channel: Pipe) -> int:
    from decentnode.errors import DecentnodeError, Interrupted
    from decentnode.sweeps.store import write_outcome

    started, folder = clock.now(), Path(task.folder)
    try:
        found = _run(task, channel)
    except Interrupted:
        return INTERRUPTED
    except DecentnodeError as error:
        told = _failed(folder, None, Failed(-1, error.exit_code, str(error).strip().splitlines()[0], str(error)))
    except Exception as error:
        from decentnode.launch.nodes.node_process import describe_failure

        told = _failed(folder, None, describe_failure(-1, error))
    else:
        if found.exit_code > 128:
            return INTERRUPTED
        told = _ended(task, folder, found)
    told = replace(told, seconds=clock.now() - started)
    write_outcome(folder, told)
    return 0


def _run(task: PointTask, channel: Pipe) -> RunOutcome:
    """Runs the point: from its own newest checkpoint if it has one, else from that of `task.resume`, else from the
    start."""
    from decentnode.errors import CheckpointError
    from decentnode.sweeps.store import has_checkpoints

    places = [""] if has_checkpoints(Path(task.folder) / task.name) else []
    for resume in (*places, *filter(None, [task.resume])):
        try:
            return _run_from(task, resume, channel)
        except CheckpointError:
            continue
    return _run_from(task, None, channel)


def _run_from(task: PointTask, resume: str | None, channel: Pipe) -> RunOutcome:
    request = replace(task.request, overrides=[*task.request.overrides, f"run.dir={json.dumps(task.folder)}"],
                      resume=resume)  # fmt: skip
    observer = Teller(channel)
    if task.by == "processes":
        from decentnode.launch.supervisor import supervise

        return supervise(request, observer, command="decentnode sweep")
    import torch

    from decentnode.launch.here import run_here

    # One thread, whatever else runs: sums over several threads may differ from those of one thread in their last bits
    torch.set_num_threads(1)
    return run_here(replace(request, in_process=True, simulate=True), observer, command="decentnode sweep")


def _ended(task: PointTask, folder: Path, found: RunOutcome) -> Outcome:
    from decentnode.sweeps.store import Outcome, without_models

    assert found.run_dir is not None
    if not task.every_model:
        without_models(found.run_dir)
    if found.exit_code:
        return _failed(folder, found.run_dir, found.failure or Failed(-1, found.exit_code, "the run failed", ""))
    return Outcome("finished", _relative(folder, found.run_dir))


def _failed(folder: Path, run: Path | None, failed: Failed) -> Outcome:
    from decentnode.errors import Diverged
    from decentnode.sweeps.store import Outcome

    where = f"node {failed.uid}: " if failed.uid >= 0 and not failed.title.startswith("node ") else ""
    status: Literal["diverged", "failed"] = "diverged" if failed.exit_code == Diverged.exit_code else "failed"
    return Outcome(status, _relative(folder, run) if run else "", f"{where}{failed.title}", failed.exit_code)


def _relative(folder: Path, run: Path) -> str:
    return os.path.relpath(os.path.realpath(run), os.path.realpath(folder))


class Teller(Observer):
    """Reports the progress of the point to the sweep."""

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel
        self._state: Any = None
        self._told = clock.now() - TELL_SECONDS

    def facts(self, facts: Facts, run_dir: Path | None) -> None:  # noqa: ARG002
        from decentnode.report.reading.measured import measured_in
        from decentnode.report.reading.progress import RunProgress

        measured = measured_in({"task": facts.task})
        self._state = RunProgress.of(facts.rounds, facts.local, facts.evaluate_every, measured,
                                     facts.own_rounds)
        self._tell()

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        if self._state.update(uid, record):
            self._tell()

    def tick(self) -> None:
        if self._state is not None and clock.now() - self._told >= TELL_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told = clock.now()
        state = self._state
        main = state.measured.main
        try:
            self._channel.send(Progress(-1, {"round": state.round, "of": state.rounds, "metric": main.text,
                                             "value": state.latest.get(f"{main.name}_mean")}))  # fmt: skip
        except OSError:  # the sweep was killed: this point ends too, without an outcome
            os._exit(1)
