"""`decentnode report`: writes an HTML report of runs."""

from __future__ import annotations

from pathlib import Path

import click

from decentnode.cli.run_names import run_names


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=run_names)
@click.option("--all-runs", is_flag=True,
              help="If RUN is the folder or the name of an experiment, take all of its runs instead of "
                   "the latest.")  # fmt: skip
@click.option("--label", "labels", multiple=True,
              help="Name of an experiment, in the order of the runs; may be repeated.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path),
              help="File to write (.html). Default: RUN/report.html of the first run.")  # fmt: skip
def command(runs: tuple[str, ...], all_runs: bool, labels: tuple[str, ...], output: Path | None) -> None:
    """Write a self-contained HTML report of runs: their configs and the differences between them, results with standard
    deviations, curves, the graph, which node waited for which, bytes by purpose, faults, every node, and how to repeat
    the runs.

    RUN is a run directory, the folder of an experiment or its name (its latest run), or latest. Runs whose configs
    differ only in the seed count as one experiment.
    """
    from decentnode.launch.files.run_dir import resolve, resolve_all
    from decentnode.report.page import write

    if output is not None and output.suffix not in (".html", ".htm"):
        raise click.UsageError(f"the report's name must end in .html, got {output.name}")
    paths = [path for run in runs for path in (resolve_all(run, Path("runs")) if all_runs else [resolve(run)])]
    target = output or paths[0] / "report.html"
    for line in write(paths, target, labels):
        click.echo(line, err=True)
    click.echo(str(target))
