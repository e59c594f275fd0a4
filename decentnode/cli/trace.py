"""`decentnode trace`: writes the timeline of a run for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

import click

from decentnode.cli.run_names import run_names


@click.command()
@click.argument("run", metavar="RUN", shell_complete=run_names)
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="First round to show.")
@click.option("--last", type=click.IntRange(0), help="Last round to show. Default: the last one of the run.")
@click.option("--node", "nodes", type=click.IntRange(0), multiple=True,
              help="Show only this node; may be repeated. Default: all nodes.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path),
              help="File to write (.json). Default: RUN/trace.json.")  # fmt: skip
def command(run: str, first: int, last: int | None, nodes: tuple[int, ...], output: Path | None) -> None:
    """Write when each node trained, sent, waited, mixed and evaluated, and its events, as a trace in Chrome's format.
    Open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

    RUN is a run directory, the folder of an experiment or its name (its latest run), or latest. With run.trace, the
    spans are exact; without it, they are reconstructed from the seconds of each round, in the usual order.
    """
    from decentnode.launch.files.run_dir import resolve
    from decentnode.report.trace import write

    if output is not None and output.suffix != ".json":
        raise click.UsageError(f"the trace's name must end in .json, got {output.name}")
    if last is not None and last < first:
        raise click.UsageError(f"--last must be at least --first ({first}), got {last}")
    path = resolve(run)
    target = output or path / "trace.json"
    for line in write(path, target, first, last, nodes):
        click.echo(line, err=True)
    click.echo(str(target))
