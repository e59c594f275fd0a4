"""`decentnode plot`: what runs did, as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from decentnode.report.runs import AXES, METRICS


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--x", "axes", type=click.Choice([*AXES, "all"]), default="all", show_default=True,
              help="What to draw against.")  # fmt: skip
@click.option("--metric", type=click.Choice([*METRICS, "all"]), default="all", show_default=True)
@click.option("--label", "labels", multiple=True, help="Name of a run in the legend, in the order of the runs.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write; .png, .pdf or .svg.")
def command(runs: tuple[str, ...], axes: str, metric: str, labels: tuple[str, ...], output: Path | None) -> None:
    """Draw runs into one figure: the mean over nodes, and a band from the lowest to the highest node.

    RUN is a run directory, the folder of an experiment (its latest run) or latest. The figure goes to RUN/plots/ of
    the first run unless -o says otherwise.
    """
    from decentnode.launch.run_dir import resolve
    from decentnode.report.plots import plot
    from decentnode.report.runs import load

    paths = [resolve(run) for run in runs]
    loaded = [load(path, label) for path, label in zip(paths, [*labels, *[""] * len(paths)], strict=False)]
    chosen_axes = list(AXES) if axes == "all" else [axes]
    metrics = list(METRICS) if metric == "all" else [metric]
    name = "_".join(["overview" if metric == "all" else metric, *([] if axes == "all" else ["by", axes])])
    if len(paths) > 1:
        name += f"_{len(paths)}_runs"
    target = output or paths[0] / "plots" / f"{name}.png"
    plot(loaded, metrics, chosen_axes, target)
    click.echo(str(target))
