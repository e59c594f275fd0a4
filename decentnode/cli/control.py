"""`decentnode control`: pauses, resumes, stops or evaluates a run in progress."""

from __future__ import annotations

import click


@click.command()
@click.argument("run")
@click.argument("action", metavar="pause|resume|stop|evaluate")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=10.0, show_default=True, metavar="SECONDS",
              help="How long to wait for the answer of the run's supervisor.")  # fmt: skip
def command(run: str, action: str, timeout: float) -> None:
    """Pause RUN, resume it, stop it after the current round, or evaluate its models now.

    All nodes of the run, on all machines, obey before the same round. A paused run waits until it is told to resume or
    stop; its nodes stay connected. An evaluation requested this way does not change the run's results. RUN is a run
    directory, the folder of an experiment or its name (its latest run), or latest; use any machine of the run.
    """
    from decentnode.launch.files.run_dir import resolve
    from decentnode.launch.supervising.controlling import ask

    click.echo(ask(resolve(run), action, timeout))
