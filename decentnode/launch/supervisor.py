"""One machine's share of a run, from the command to the exit code. Imports no torch: children load the experiment."""

from __future__ import annotations

from pathlib import Path

from decentnode import clock
from decentnode.launch import forkserver
from decentnode.launch.messages import Request
from decentnode.launch.observer import Observer
from decentnode.launch.outcome import Outcome
from decentnode.launch.run import Command, Run
from decentnode.launch.run_dir import Records
from decentnode.launch.signals import StopSignals
from decentnode.launch.workers import Loader
from decentnode.metrics import summary as summaries


def supervise(
    request: Request, observer: Observer, *, command: str = "", started: float | None = None, dry_run: bool = False
) -> Outcome:
    """Run this machine's nodes to the end. Blocking.

    command: the command line, for the run directory. started: `clock.now()` of the command. dry_run: write
    nothing. Raises the error of an experiment that cannot be loaded (DecentnodeError with its exit code); later errors
    are in the outcome.
    """
    started = clock.now() if started is None else started
    with StopSignals() as signals:
        context = forkserver.start()
        loader = Loader(context, request)
        run: Run | None = None
        try:
            facts = loader.facts(observer, signals)
            if facts.finished and facts.resume:
                observer.notice(facts.finished)
                run_dir = Path(facts.resume[0])
                return Outcome(0, run_dir, summaries.read(run_dir / "summary.json"))
            records = None if dry_run else Records(facts, request.config, command)
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
