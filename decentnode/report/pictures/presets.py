"""Figures that answer one question each: nodes side by side, agreement, the merged model, and the cost of a target."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from decentnode.errors import UsageError
from decentnode.metrics.figures import EVERY_AXIS, VIRTUAL
from decentnode.report.pictures.plots import (
    MERGED,
    PAPER_HEIGHT,
    PAPER_WIDTH,
    color_of,
    dashes_of,
    integer_ticks,
    legend_of_lines,
    new_figure,
    plain_log_labels,
    title,
    unit_of,
)
from decentnode.report.reading.reached import Target, better_of, first_reached
from decentnode.report.reading.runs import Line, axes_of, chosen_curves, overview

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = 60
"""Number of levels between the first and the best value for which costs are computed."""


def heat_map(lines: Sequence[Line], metric: str, axes: Sequence[str], paper: bool = False) -> Figure:  # noqa: ARG001
    """Returns a heat map with a row per node and a column per evaluation (or round), colored by the node's value. With
    several seeds the first run is shown. Raises UsageError for more than one line, or if there is nothing to draw."""
    curve = chosen_curves(lines, [metric])[metric]
    if len(lines) > 1:
        names = ", ".join(each.label for each in lines)
        raise UsageError(f"a heat map shows one experiment, got {len(lines)}: {names}")
    run = lines[0].runs[0]
    by_round = run.by_node(metric)
    uids = sorted({uid for by_uid in by_round.values() for uid in by_uid})
    if not uids:
        raise UsageError(f"nothing to plot: no record of {metric} in {lines[0].label}")
    rounds = [*by_round]
    rows = [[by_round[r][uid][0] if uid in by_round[r] else float("nan") for r in rounds] for uid in uids]
    figure = new_figure(*((PAPER_WIDTH, PAPER_HEIGHT) if paper else (7.0, min(9.0, 2.2 + 0.14 * len(uids)))))
    panel = figure.subplots()
    image = panel.pcolormesh(_edges(rounds), range(len(uids) + 1), rows, cmap="cividis", shading="flat",
                             rasterized=len(uids) * len(rounds) > 20_000)  # fmt: skip
    bar = figure.colorbar(image, ax=panel, label=curve.label, pad=0.02)
    bar.outline.set_visible(False)
    step = max(1, round(len(uids) / 16))
    panel.set_yticks([place + 0.5 for place in range(0, len(uids), step)], [str(uid) for uid in uids[::step]])
    panel.set_ylim(len(uids), 0)
    integer_ticks(panel)
    panel.set_xlabel("rounds")
    panel.set_ylabel("node")
    panel.spines[["top", "right", "left", "bottom"]].set_visible(False)
    if not paper:
        several = f", run {run.path.name}" if len(lines[0].runs) > 1 else ""
        title(figure, f"{lines[0].label}: every node's own model{several}")
    return figure


def _edges(places: Sequence[float]) -> list[float]:
    """Returns the borders of columns: the midpoints between two positions."""
    if len(places) == 1:
        return [places[0] - 0.5, places[0] + 0.5]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    return [2 * places[0] - middles[0], *middles, 2 * places[-1] - middles[-1]]


def consensus(lines: Sequence[Line], metric: str, axes: Sequence[str], paper: bool = False) -> Figure:  # noqa: ARG001
    """Returns the metric against the consensus distance at the same evaluations, a path per experiment that ends in a
    large dot. The evaluation before the first round, when all models are equal, is left out. Raises UsageError."""
    curve = chosen_curves(lines, [metric])[metric]
    figure = new_figure(*((PAPER_WIDTH, PAPER_HEIGHT) if paper else (6.2, 4.2)))
    panel = figure.subplots()
    drawn = []
    for index, line in enumerate(lines):
        values, distances = line.series(metric, "rounds"), line.series("consensus_distance", "rounds")
        distance_at = dict(zip(distances.x, distances.mean, strict=True))
        pairs = [(distance_at[x], y) for x, y in zip(values.x, values.mean, strict=True)
                 if x > 0 and distance_at.get(x, 0.0) > 0]  # fmt: skip
        if not pairs:
            continue
        drawn.append(index)
        x, y = [a for a, _ in pairs], [b for _, b in pairs]
        panel.plot(x, y, dashes_of(index), color=color_of(index), marker=".", markersize=4, linewidth=0.9,
                   label=line.label)  # fmt: skip
        panel.plot(x[-1:], y[-1:], "o", color=color_of(index), markersize=7)
    if not drawn:
        raise UsageError(f"nothing to plot: no evaluation with {metric} and consensus_distance above 0")
    panel.set_xscale("log")
    plain_log_labels(panel)
    panel.set_xlabel("consensus distance (relative)")
    panel.set_ylabel(curve.label)
    _finish(figure, panel, lines, drawn, paper, "mean of the nodes' own models; the large dot is the end", bands=False)
    return figure


def merged(lines: Sequence[Line], metric: str, axes: Sequence[str], paper: bool = False) -> Figure:
    """Returns two panels: the nodes' own models and, dashed, the merged one; and by how much the merged one is better.
    Bands are standard deviations over seeds. Raises UsageError for a metric that is not measured for the merged
    model."""
    curve = chosen_curves(lines, [metric])[metric]
    if not curve.merged:
        raise UsageError(f"{metric} is not measured for the merged model")
    axis = axes[0]
    width, height = (PAPER_WIDTH, 1.6 * PAPER_HEIGHT) if paper else (6.2, 5.4)
    figure = new_figure(width, height)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    drawn, sign = [], 1 if better_of(metric, lines[0].runs[0].measured) == "higher" else -1
    unit = _unit(lines, metric, axis)
    for index, line in enumerate(lines):
        own, merged_series = line.series(metric, axis), line.series(metric, axis, merged=True)
        if not own.x or not merged_series.x:
            continue
        drawn.append(index)
        x, color, dashes = [value / unit[0] for value in own.x], color_of(index), dashes_of(index)
        upper.plot(x, own.mean, dashes, color=color, label=line.label)
        if len(line.runs) > 1:
            upper.fill_between(x, own.low, own.high, color=color, alpha=0.18, linewidth=0)
        upper.plot([value / unit[0] for value in merged_series.x], merged_series.mean, "--", color=color,
                   label=MERGED)  # fmt: skip
        positions, mean, deviation = _gap(line, metric, axis, sign)
        lower.plot([value / unit[0] for value in positions], mean, dashes, color=color)
        if len(line.runs) > 1:
            low, high = ([m + s * d for m, d in zip(mean, deviation, strict=True)] for s in (-1, 1))
            lower.fill_between([value / unit[0] for value in positions], low, high, color=color, alpha=0.18,
                               linewidth=0)  # fmt: skip
    if not drawn:
        raise UsageError(f"nothing to plot: no evaluation of {metric} of the merged model")
    lower.axhline(0, color="#606060", linewidth=0.6)
    upper.set_ylabel(curve.label)
    lower.set_ylabel("merged better by" + (" (points)" if curve.scale == 100 else ""))
    lower.set_xlabel(EVERY_AXIS[axis] + unit[1])
    if axis == "rounds":
        integer_ticks(lower)
    _clean_up(upper)
    _finish(figure, lower, lines, drawn, paper, "nodes' own models (mean), and the merged model")
    return figure


def _gap(line: Line, metric: str, axis: str, sign: int) -> tuple[list[float], list[float], list[float]]:
    """Returns (positions, mean over seeds of how much better the merged model is, standard deviation) for the rounds
    that all runs have. The difference is taken within each run."""
    by_run = []
    for run in line.runs:
        own, merged_values = run.by_round(metric, axis), run.by_round(metric, axis, merged=True)
        by_run.append({r: (own[r][0], sign * (merged_values[r][1].mean - own[r][1].mean))
                      for r in own if r in merged_values})  # fmt: skip
    rounds = sorted(set(by_run[0]).intersection(*by_run[1:]))
    gaps = [[each[r][1] for each in by_run] for r in rounds]
    return ([statistics.fmean(each[r][0] for each in by_run) for r in rounds], [statistics.fmean(g) for g in gaps],
            [statistics.stdev(g) if len(g) > 1 else 0.0 for g in gaps])  # fmt: skip


def target(lines: Sequence[Line], metric: str, axes: Sequence[str], paper: bool = False) -> Figure:
    """Returns a panel per axis: the cost until the mean over the nodes reached each value. With several seeds: the mean
    of the runs and a band of one standard deviation, for the values that all of them reached. Raises UsageError."""
    curve = chosen_curves(lines, [metric])[metric]
    figure = new_figure(*((PAPER_WIDTH, PAPER_HEIGHT * (1 if len(axes) == 1 else 0.8 * len(axes))) if paper
                          else (0.8 + 4.2 * len(axes), 3.9)))  # fmt: skip
    shape = (len(axes), 1) if paper else (1, len(axes))
    panels = [each for row in figure.subplots(*shape, squeeze=False) for each in row]
    drawn: list[int] = []
    for panel, axis in zip(panels, axes, strict=True):
        unit = _unit(lines, metric, axis)
        for index, line in enumerate(lines):
            levels, costs = _costs(line, metric, axis)
            if not levels:
                continue
            if index not in drawn:
                drawn.append(index)
            means = [statistics.fmean(each) / unit[0] for each in costs]
            panel.plot(levels, means, dashes_of(index), color=color_of(index), drawstyle="steps-pre",
                       label=line.label)  # fmt: skip
            if len(line.runs) > 1:
                spread = [statistics.stdev(each) / unit[0] for each in costs]
                least = [min(each) / unit[0] for each in costs]  # lower limit of the band: no run cost less
                panel.fill_between(levels, [max(m - s, low) for m, s, low in zip(means, spread, least, strict=True)],
                                   [m + s for m, s in zip(means, spread, strict=True)], step="pre",
                                   color=color_of(index), alpha=0.18, linewidth=0)  # fmt: skip
        panel.set_xlabel(curve.label)
        panel.set_ylabel(f"{EVERY_AXIS[axis]}{unit[1]}" if not axis.endswith("seconds") else EVERY_AXIS[axis])
        _clean_up(panel)
        positive = [y for drawn_line in panel.get_lines() for y in drawn_line.get_ydata() if y > 0]
        if positive and max(positive) > 20 * min(positive):
            panel.set_yscale("log")
    if not drawn:
        raise UsageError(f"nothing to plot: no run improved in {metric}")
    _finish(figure, panels[-1], lines, sorted(drawn), paper, "cost until the mean of the nodes reached this value")
    return figure


def _costs(line: Line, metric: str, axis: str) -> tuple[list[float], list[list[float]]]:
    """Returns the levels that all runs of a line reached, and the cost of each run for each level."""
    first = line.runs[0].measured
    better = better_of(metric, first)
    choose: Callable[..., float] = max if better == "higher" else min
    means = [[values.mean for _, values in run.by_round(metric, "rounds").values()] for run in line.runs]
    if not all(means):
        return [], []
    begin, end = choose(each[0] for each in means), (min if better == "higher" else max)(choose(m) for m in means)
    if choose(begin, end) == begin:  # also if one seed began better than another one ended
        return [], []
    positions = [run.by_round(metric, axis) for run in line.runs]
    levels, costs = [], []
    for step in range(1, LEVELS + 1):
        level = begin + (end - begin) * step / LEVELS
        goal = Target(metric, level - (1e-9 if better == "higher" else -1e-9), better, "")
        reached = [first_reached(run, goal) for run in line.runs]
        if all(r is not None and r in run_positions for r, run_positions in zip(reached, positions, strict=True)):
            levels.append(level)
            costs.append([run_positions[r][0] for r, run_positions in zip(reached, positions, strict=True)
                          if r is not None])  # fmt: skip
    return levels, costs


# -- shared by the presets --------------------------------------------------------------------------------------


def _unit(lines: Sequence[Line], metric: str, axis: str) -> tuple[float, str]:
    """Returns the unit of an axis of bytes and its suffix for labels; 1 and "" for other axes."""
    if axis != "bytes":
        return 1.0, ""
    size, name = unit_of([x for line in lines for x in line.series(metric, axis).x])
    return size, f" ({name})"


def _clean_up(panel: Axes) -> None:
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _finish(
    figure: Figure, panel: Axes, lines: Sequence[Line], drawn: Sequence[int], paper: bool, text: str,
    *, bands: bool = True,
) -> None:
    """Writes title and legend. bands: whether the figure has bands."""
    _clean_up(panel)
    if not paper:
        several = any(len(line.runs) > 1 for line in lines)
        seeds = f"; means over seeds{', bands of one standard deviation' if bands else ''}" if several else ""
        title(figure, text + seeds)
    legend_of_lines(figure, lines, drawn)


PRESETS: dict[str, Callable[..., Figure]] = {
    "heat-map": heat_map, "consensus": consensus, "merged": merged, "target": target,
}  # fmt: skip
"""By name: a function of (lines, metric, axes, paper) that returns a figure."""
AXES_OF = {"heat-map": ("rounds",), "consensus": ("rounds",), "merged": ("rounds",), "target": ("seconds", "bytes")}
"""The axes of a preset if the user chooses none."""


def draw(name: str, lines: Sequence[Line], metric: str = "all", axis: str = "all", paper: bool = False) -> Figure:
    """Returns the figure of a preset. metric: "all" stands for the tasks' main one. Raises UsageError for an unknown
    name, and as the presets do."""
    if name not in PRESETS:
        raise UsageError(f"preset must be one of curves, {', '.join(PRESETS)}, got {name!r}")
    metric = overview(lines)[0] if metric == "all" else metric
    axes = [axis] if axis != "all" else [*AXES_OF[name]]
    if axis == "all" and name == "target" and VIRTUAL in axes_of(lines):
        axes = [VIRTUAL, "bytes"]
    return PRESETS[name](lines, metric, axes, paper)
