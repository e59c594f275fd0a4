"""Pictures of runs: accuracy, loss and consensus distance over rounds, seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "accuracy": "test accuracy of local models",
    "loss": "training loss",
    "consensus_distance": "consensus distance",
    "rounds": "rounds",
    "seconds": "seconds",
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito (2008), told apart by color-blind readers too."""
LOGARITHMIC = frozenset({"consensus_distance", "loss"})
SUFFIXES = (".png", ".pdf", ".svg")
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def plot(runs: Sequence[Run], metrics: Sequence[str], axes: Sequence[str], path: Path) -> None:
    """One panel per metric (rows) and axis (columns); a line for the mean, a band from the lowest to the highest node.

    The suffix of `path` chooses the format. Raises UsageError for an unknown one or nothing to draw,
    EnvironmentFault when the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"the picture's name must end in {', '.join(SUFFIXES)}, got {path.name}")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = (len(metrics), len(axes))
    size = (1.2 + 4.2 * shape[1], 0.9 + 2.9 * shape[0])
    figure, panels = plt.subplots(*shape, figsize=size, squeeze=False, sharey="row", layout="constrained")
    drawn = False
    for row, metric in enumerate(metrics):
        for column, axis in enumerate(axes):
            drawn |= _panel(panels[row][column], runs, metric, axis, bottom=row == shape[0] - 1)
        panels[row][0].set_ylabel(LABELS[metric])
    if not drawn:
        plt.close(figure)
        raise UsageError(f"nothing to draw: no record of {', '.join(metrics)} in {', '.join(r.label for r in runs)}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    if len(runs) > 1:
        figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(runs)), frameon=False)
    else:
        nodes = len(runs[0].nodes)
        figure.suptitle(f"{runs[0].label}: mean of {nodes} nodes, band from lowest to highest", fontsize="medium")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error
    finally:
        plt.close(figure)


def _panel(panel: Axes, runs: Sequence[Run], metric: str, axis: str, bottom: bool) -> bool:
    """Draw all runs into one panel; whether there was something to draw."""
    drawn: list[tuple[Any, Run]] = [(series, run) for run in runs if (series := run.series(metric, axis)).x]
    unit, name = _unit([max(series.x) for series, _ in drawn]) if axis == "bytes" else (1.0, LABELS[axis])
    for series, run in drawn:
        color = COLORS[list(runs).index(run) % len(COLORS)]
        x = [value / unit for value in series.x]
        marker = "o" if len(x) <= 40 else None
        panel.plot(x, series.mean, color=color, marker=marker, markersize=3, linewidth=1.4, label=run.label)
        if metric != "consensus_distance":
            panel.fill_between(x, series.low, series.high, color=color, alpha=0.18, linewidth=0)
    values = [value for series, _ in drawn for value in (*series.low, *series.mean)]
    if metric in LOGARITHMIC and values and min(values) > 0 and max(values) / min(values) > 5:
        panel.set_yscale("log")
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlim(left=0)
    if bottom:
        panel.set_xlabel(name if axis != "bytes" else f"{name} sent by all nodes")
    return bool(drawn)


def _unit(largest: Sequence[float]) -> tuple[float, str]:
    most = max(largest, default=1.0)
    return next((unit for unit in UNITS if most >= unit[0]), UNITS[-1])
