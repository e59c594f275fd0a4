"""The plot of a sweep: its metric over one key, with a line for every combination of the other keys."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentnode.errors import UsageError
from decentnode.report.pictures.plots import COLORS, SUFFIXES, color_of, dashes_of, legend, new_figure, save
from decentnode.sweeps.results import ALPHA, Results, Row, short_settings
from decentnode.sweeps.space import Settings, short_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LINES = 24
"""Lines in a plot; further ones, the worst, are left out."""
BAR_DISTANCE = 3 / 72
"""Horizontal distance in inches between the error bars of two lines at the same value."""
MAX_ROWS = 40
"""Rows in a plot without a numeric key; further ones, the worst, are left out."""


def draw(results: Results) -> Figure:
    """Returns a figure that pyplot does not manage. With a numeric key: means with error bars of one standard deviation
    over seeds; without one: a row per combination, best first, with a dot per seed. Raises UsageError if no point has
    finished."""
    rows = [each for each in results.rows if each.mean is not None]
    if not rows:
        raise UsageError("nothing to plot: no point has finished")
    rows = [each for each in rows if each.rounds == rows[0].rounds]
    key = numeric_key([each.settings for each in rows])
    if key is None:
        figure = new_figure(7.0, 1.4 + 0.32 * min(len(rows), MAX_ROWS))
        _rows(figure.subplots(), results, rows[:MAX_ROWS])
        _title(figure, results, rows, any(each.worse for each in rows[:MAX_ROWS]))
    else:
        figure = new_figure(7.0, 4.2)
        _lines(figure, results, rows, key)
        _title(figure, results, rows, False)
    return figure


def plot(results: Results, path: Path) -> None:
    """Writes the plot to a file. Raises UsageError as `draw` does and for an unknown suffix; EnvironmentFault."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"the picture's name must end in {', '.join(SUFFIXES)}, got {path.name}")
    save(draw(results), path)


def numeric_key(settings: Sequence[Settings]) -> str | None:
    """Returns the key with the most values among those that have several values, all numeric. Returns None if there is
    none, or if the other, non-numeric keys differ in every combination: dots without names would say nothing."""
    values: dict[str, set[str]] = {}
    for each in settings:
        for key, value in each:
            values.setdefault(key, set()).add(value)
    several = {key: len(values_of_key) for key, values_of_key in values.items() if len(values_of_key) > 1}
    numbers = {key: count for key, count in several.items() if None not in map(_number, values[key])}
    chosen = max(numbers, key=numbers.__getitem__, default=None)
    names = [tuple(pair for pair in each if pair[0] not in numbers) for each in settings]
    return None if len({*names}) == len(names) > 1 else chosen


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _lines(figure: Figure, results: Results, rows: Sequence[Row], key: str) -> None:
    short = {each.settings: settings for each, settings in zip(rows, short_settings(rows), strict=True)}
    groups: dict[Settings, list[Row]] = {}
    for each in rows:
        groups.setdefault(tuple(pair for pair in each.settings if pair[0] != key), []).append(each)
    from matplotlib.transforms import ScaledTranslation

    panel, scale = figure.subplots(), results.metric.scale
    names = short_names([name for name, _ in rows[0].settings])
    drawn = groups if len(groups) > 1 and max(map(len, groups.values())) > 1 else {(): [*rows]}
    for index, (others, group) in enumerate(list(drawn.items())[:MAX_LINES]):
        group = sorted(group, key=lambda each: _at(each, key))
        x, mean = [_at(each, key) for each in group], [scale * (each.mean or 0.0) for each in group]
        bars = [scale * (each.deviation or 0.0) for each in group]
        color, dashes = color_of(index), dashes_of(index)
        # Random draws of several keys have no order along one of them: no connecting lines
        dashes = dashes if drawn is groups or len(rows[0].settings) == 1 else ""
        label = " ".join(f"{names[name]}={short[group[0].settings][name]}" for name, _ in others)
        # Error bars of several lines at the same value would hide each other
        inches = (index - (min(len(drawn), MAX_LINES) - 1) / 2) * BAR_DISTANCE
        offset = ScaledTranslation(inches, 0, figure.dpi_scale_trans)
        bar_artists = panel.errorbar(x, mean, bars if any(bars) else None, fmt=f"o{dashes}", color=color, markersize=4,
                                     capsize=3, linewidth=1.2, label=label)  # fmt: skip
        for artist in bar_artists.get_children():
            artist.set_transform(panel.transData + offset)
    points = sorted({_at(each, key) for each in rows})
    if points[0] > 0 and points[-1] / points[0] >= 10:
        panel.set_xscale("log")
    if len(points) <= 8:
        panel.set_xticks(points, [f"{value:g}" for value in points])
        panel.minorticks_off()
    panel.set_xlabel(key)
    panel.set_ylabel(results.metric.title or results.metric.name)
    _finish(panel)
    if len(drawn) > 1:
        legend(figure, *panel.get_legend_handles_labels())


def _at(row: Row, key: str) -> float:
    return float(dict(row.settings)[key])


def _rows(panel: Any, results: Results, rows: Sequence[Row]) -> None:
    scale = results.metric.scale
    for index, each in enumerate(rows):
        values = [scale * value for value in each.values.values()]
        color = "#808080" if each.worse else COLORS[0]
        panel.plot(values, [index] * len(values), ".", color=color, alpha=0.5)
        panel.errorbar([scale * (each.mean or 0.0)], [index], xerr=[statistics.stdev(values)] if len(values) > 1
                       else None, fmt="o", color=color, capsize=3)  # fmt: skip
    names = short_names([name for name, _ in rows[0].settings])
    labels = [" ".join(f"{names[name]}={value}" for name, value in each.items()) for each in short_settings(rows)]
    panel.set_yticks(range(len(rows)), [textwrap.fill(each, 60, max_lines=2) or "the experiment as it is"
                                        for each in labels])  # fmt: skip
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlabel(results.metric.title or results.metric.name)
    _finish(panel)


def _finish(panel: Any) -> None:
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _title(figure: Figure, results: Results, rows: Sequence[Row], gray: bool) -> None:
    """Writes the title. gray: whether some rows are drawn in gray."""
    most = max(len(each.values) for each in rows)
    bars = f": mean of {most} seeds, bars of one standard deviation" if most > 1 else ""
    cut = " (cut off)" if results.partial else ""
    meaning = f"\ngray: worse than the best (paired t-test, p < {ALPHA:g})" if gray else ""
    figure.suptitle(f"{results.name}{cut}{bars}{meaning}", fontsize="medium")
