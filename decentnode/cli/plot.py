"""`decentnode plot`: plots what runs recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decentnode.cli.run_names import run_names
from decentnode.metrics.figures import EVERY_AXIS

if TYPE_CHECKING:
    from decentnode.report.reading.runs import Line


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=run_names)
@click.option("--x", "axes", type=click.Choice([*EVERY_AXIS, "all"]), default="all", show_default=True,
              help="Horizontal axis; all: rounds, seconds, bytes, and virtual_seconds for runs that have them.")
@click.option("--metric", default="all", show_default=True,
              help="What to plot: a metric of the runs' task, such as accuracy, test_loss or perplexity; "
                   "loss (of training), consensus_distance or consensus_rms.")  # fmt: skip
@click.option("--all-runs", is_flag=True,
              help="If RUN is the folder or the name of an experiment, take all of its runs instead of "
                   "the latest.")  # fmt: skip
@click.option("--label", "labels", multiple=True,
              help="Legend label of a line, in the order of the runs; may be repeated.")  # fmt: skip
@click.option("--preset", type=click.Choice(["curves", "heat-map", "consensus", "merged", "target"]), default="curves",
              show_default=True,
              help="curves: metrics by rounds, seconds and bytes; heat-map: every node by rounds, for "
                   "one experiment; consensus: the metric against the consensus distance; merged: the "
                   "merged model against the nodes' own, and the gap; target: seconds and bytes until a "
                   "value was reached.")  # fmt: skip
@click.option("--panel", metavar="KEY",
              help="One panel for each value of this key, such as graph.name. Default in each panel: the "
                   "main metric by rounds.")  # fmt: skip
@click.option("--paper", is_flag=True,
              help="For papers: column width (3.3 in), vector graphics (PDF, or SVG with -o), colors for "
                   "color-blind readers, no title; curves have a single panel, by default the task's "
                   "main metric by rounds.")  # fmt: skip
@click.option("--dumps", is_flag=True,
              help="Plot which entries the sharing rule chose to send, from the dumps of one run "
                   "(sharing.dump).")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path),
              help="File to write: .png, .pdf or .svg; .csv for the values of each round and node.")  # fmt: skip
def command(
    runs: tuple[str, ...], axes: str, metric: str, all_runs: bool, labels: tuple[str, ...], preset: str,
    panel: str | None, paper: bool, dumps: bool, output: Path | None,
) -> None:
    """Plot runs in one figure: the mean over nodes, and a band from the lowest to the highest node.

    RUN is a run directory, the folder of an experiment or its name (its latest run), or latest. Runs whose configs
    differ only in the seed become one line, with a band of one standard deviation on either side. A run that failed is
    drawn up to its last round, and its label says so. Without -o, the figure is written to RUN/plots/ of the first run.
    """
    from decentnode.launch.files.run_dir import resolve, resolve_all
    from decentnode.report.pictures.plots import check_name, draw_side_by_side, plot, write
    from decentnode.report.reading.runs import axes_of, curves_of, lines, overview

    if dumps:
        _print_result([], _dumps(runs, output))
        return
    as_csv = output is not None and output.suffix == ".csv"
    if panel is not None and (preset != "curves" or as_csv):
        raise click.UsageError("--panel needs --preset curves")
    if output is not None and not (as_csv and preset == "curves"):
        check_name(output, paper)
    paths = [path for run in runs for path in (resolve_all(run, Path("runs")) if all_runs else [resolve(run)])]
    drawn, notes = lines(paths, labels, seeds_once=all_runs, panel=panel)
    if preset != "curves":
        _print_result(notes, _preset(preset, drawn, metric, axes, paper, output, paths[0]))
        return
    ending = "_paper.pdf" if paper else ".png"
    if paper or panel is not None:
        metric, axes = overview(drawn)[0] if metric == "all" else metric, "rounds" if axes == "all" else axes
    if panel is not None:
        target = output or paths[0] / "plots" / f"{metric}_by_{axes}_per_{panel.replace('.', '_')}{ending}"
        write(lambda: draw_side_by_side(drawn, metric, axes, paper), target, paper)
        _print_result(notes, target)
        return
    metrics = overview(drawn) if metric == "all" else [metric]
    if output is not None and as_csv:
        from decentnode.report.series_table import csv_of
        from decentnode.system import write_atomic

        if metric == "all":
            metrics = [*curves_of(drawn)]
        write_atomic(output, csv_of(drawn, metrics))
        _print_result(notes, output)
        return
    name = "_".join(["overview" if metric == "all" else metric, *([] if axes == "all" else ["by", axes])])
    if len(paths) > 1:
        name += f"_{len(paths)}_runs"
    target = output or paths[0] / "plots" / f"{name}{ending}"
    notes += [f"nothing to plot for {label}" for label in
              plot(drawn, metrics, axes_of(drawn) if axes == "all" else [axes], target, paper)]  # fmt: skip
    _print_result(notes, target)


def _print_result(notes: Sequence[str], target: Path) -> None:
    """Prints the notes to stderr, and the path of the written file to stdout."""
    for line in notes:
        click.echo(line, err=True)
    click.echo(str(target))


def _dumps(runs: Sequence[str], output: Path | None) -> Path:
    """Plots the dumps of one run. Returns the file."""
    from decentnode.launch.files.run_dir import resolve
    from decentnode.report.pictures.dumps import plot

    if len(runs) > 1:
        raise click.UsageError(f"--dumps takes one run, got {len(runs)}")
    target = output or resolve(runs[0]) / "plots" / "dumps.png"
    plot(resolve(runs[0]), target)
    return target


def _preset(
    name: str, drawn: list[Line], metric: str, axis: str, paper: bool, output: Path | None, run: Path
) -> Path:
    """Draws a preset figure. Returns the file."""
    from decentnode.report.pictures.plots import write
    from decentnode.report.pictures.presets import draw
    from decentnode.report.reading.runs import overview

    metric = overview(drawn)[0] if metric == "all" else metric
    stem = "_".join([name.replace("-", "_"), metric, *(["paper"] if paper else [])])
    target = output or run / "plots" / f"{stem}.{'pdf' if paper else 'png'}"
    write(lambda: draw(name, drawn, metric, axis, paper), target, paper)
    return target
