"""Runs this machine's part of a run, from the command to the exit code. Imports no torch: children load the
experiment."""

from __future__ import annotations

from decentnode import clock
from decentnode.launch.children import forkserver
from decentnode.launch.children.messages import Request
from decentnode.launch.children.signals import StopSignals
from decentnode.launch.files.run_dir import Records
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Outcome, finished_before
from decentnode.launch.supervising.local_run import Command
from decentnode.launch.supervising.run import Run
from decentnode.launch.supervising.workers import Context, Loader


def supervise(
    request: Request, observer: Observer, *, command: str = "", started: float | None = None, dry_run: bool = False,
    context: Context | None = None,
) -> Outcome:
    """Runs this machine's nodes to the end. Blocking.

    command: the command line, for the run directory. started: `clock.now()` at the start of the command. dry_run:
    whether nothing is written. context: starts the processes; the fork server if None. Raises the error of an
    experiment that cannot be loaded (a DecentnodeError with its exit code); later errors are in the outcome.
    """
    started = clock.now() if started is None else started
    with StopSignals() as signals:
        context = context or forkserver.start(request)
        loader = Loader(context, request)
        run: Run | None = None
        try:
            facts = loader.facts(observer, signals)
            finished = finished_before(facts, observer.notice)
            if finished is not None:
                return finished
            records = None if dry_run else Records(facts, request.shown, command)
            observer.facts(facts, records.directory if records else None)
            run = Run(Command(request, observer, signals, started), facts, records)
            run.start(context)
            on_header = run.on_header
            run.loop(lambda: loader.poll(on_header))
            loader.poll(on_header)
        finally:
            if run is not None:
                run.close()
            loader.close()
        return run.conclude()
