"""Plots of runs: the tasks' metrics, loss and consensus distance over rounds, seconds and bytes."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.formatting import plural
from decentnode.metrics.figures import EVERY_AXIS, Curve
from decentnode.report.reading.runs import Line, Series, chosen_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito (2008): color-blind readers can distinguish them too. Gray instead of their yellow, as a thin yellow
line can hardly be seen on white."""
DASHES = ("-", "-.", ":")
"""Line styles: the first for the first len(COLORS) lines, the others for later lines, which reuse the colors; merged
models are dashed."""
SUFFIXES = (".png", ".pdf", ".svg")
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
MERGED = "merged model"
WIDTH_SHARE = 0.97
"""Largest fraction of the figure's width that a legend or a title takes."""

MAX_UNJOINED = 2
"""Up to this many points are not joined by a line: the course between them is unknown."""
MAX_POINTS = 400
"""Most points of a line. Longer curves, such as the losses of thousands of rounds, are averaged in blocks: otherwise
only noise would be visible."""
LOG_RATIO = 5.0
"""If the final bytes of lines differ by more than this factor, the axis is logarithmic."""
PAPER_SUFFIXES = (".pdf", ".svg")
PAPER_WIDTH, PAPER_HEIGHT = 3.3, 2.3
"""Inches: one column of a two-column page."""
PAGE_WIDTH = 7.0
"""Inches: both columns."""
LABEL_CHARACTERS = 24
"""Characters per line of an axis label below one of four panels side by side."""
PAPER: dict[str, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["Arial", "Helvetica", "DejaVu Sans"], "font.size": 8,
    "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7, "axes.linewidth": 0.6,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.1,
    "pdf.fonttype": 42, "ps.fonttype": 42,  # TrueType fonts, which can be searched and edited; publishers refuse Type 3
}  # fmt: skip


def plot(
    lines: Sequence[Line], metrics: Sequence[str], axes: Sequence[str], path: Path, paper: bool = False
) -> list[str]:
    """Draws like `draw` and writes the figure to a file. Returns the labels of lines that appear in no panel.

    paper: one panel as wide as a column, as PDF or SVG. The suffix of `path` chooses the format. Raises UsageError as
    `draw` and `write` do, EnvironmentFault if the file cannot be written.
    """
    if paper and (len(metrics), len(axes)) != (1, 1):
        raise UsageError(f"--paper needs one panel, got {len(metrics)} x {len(axes)}")
    left_out: list[str] = []

    def make_figure() -> Figure:
        figure, names = draw(lines, metrics, axes, paper)
        left_out.extend(names)
        return figure

    write(make_figure, path, paper)
    return left_out


def write(make_figure: Callable[[], Figure], path: Path, paper: bool = False) -> None:
    """Draws a figure, for papers in their style, and writes it to a file. Raises UsageError for an unknown suffix,
    EnvironmentFault if the file cannot be written."""
    check_name(path, paper)
    import matplotlib

    style: Any = PAPER if paper else {}
    with matplotlib.rc_context(style):
        save(make_figure(), path, "; choose another place with -o")


def check_name(path: Path, paper: bool = False) -> None:
    """Raises UsageError unless the suffix of a picture's file is that of a known format, for papers of vector graphics.
    """
    suffixes = PAPER_SUFFIXES if paper else SUFFIXES
    if path.suffix not in suffixes:
        where = " with --paper" if paper else ""
        raise UsageError(f"the picture's name must end in {', '.join(suffixes)}{where}, got {path.name}")


def save(figure: Figure, path: Path, remedy: str = "") -> None:
    """Writes a figure in the format of the path's suffix. Raises EnvironmentFault, whose text ends with `remedy`, if
    the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror}{remedy}") from error


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of this size in inches. pyplot does not manage it: nobody has to close it, and the
    program's backend is unchanged. Notebooks display it with any backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class RunFigure(Figure):
        def _repr_png_(self) -> bytes:
            self.savefig(data := io.BytesIO(), format="png", dpi=100)
            return data.getvalue()

    figure = RunFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_source_note(figure: Figure, text: str) -> None:
    """Writes a small line into the lower right corner that says where the figure comes from."""
    height = 11 / 72 / figure.get_figheight()
    figure.set_figheight(figure.get_figheight() + 11 / 72)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.0, height, 1.0, 1.0 - height))
    figure.text(0.995, 0.15 * height, text, ha="right", va="bottom", fontsize=6, color="#707070")


def draw(
    lines: Sequence[Line], metrics: Sequence[str], axes: Sequence[str], paper: bool = False
) -> tuple[Figure, list[str]]:
    """Returns (a figure, the labels of lines that appear in no panel). The figure has one panel per metric (rows) and
    axis (columns), and a line for the mean over nodes, and over seeds if there are several.

    Bands span the lowest to the highest node, or one standard deviation over seeds to either side. Raises UsageError
    for an unknown metric or if there is nothing to draw.
    """
    chosen = chosen_curves(lines, metrics)
    shape = (len(metrics), len(axes))
    size = (PAPER_WIDTH, PAPER_HEIGHT) if paper else (1.2 + 4.2 * shape[1], 0.9 + 2.9 * shape[0])
    figure = new_figure(*size)
    panels = figure.subplots(*shape, squeeze=False, sharey="row")
    drawn = _panels(panels, lines, chosen, axes)
    if not drawn:
        names = ", ".join(line.label for line in lines)
        raise UsageError(f"nothing to plot: no record of {', '.join(metrics)} in {names}")
    if not paper:
        _title(figure, lines)
    legend_of_lines(figure, lines, drawn)
    return figure, [line.label for index, line in enumerate(lines) if index not in drawn]


def draw_side_by_side(lines: Sequence[Line], metric: str, axis: str, paper: bool = False) -> Figure:
    """Returns a figure with a panel for each value of the lines' `panel`, all with the same axes; lines with the same
    label have the same color. paper: as wide as a page. Raises UsageError for an unknown metric or if there is nothing
    to draw."""
    curve = chosen_curves(lines, [metric])[metric]
    titles = [*dict.fromkeys(line.panel for line in lines)]
    columns = len(titles) if len(titles) <= 3 else min(4, -(-len(titles) // 2))
    shape = (-(-len(titles) // columns), columns)
    size = (PAGE_WIDTH, 0.4 + 1.7 * shape[0]) if paper else (1.2 + 3.1 * columns, 0.9 + 2.5 * shape[0])
    figure = new_figure(*size)
    panels = [*figure.subplots(*shape, squeeze=False, sharex=True, sharey=True).flat]
    shared = _shared_axis(lines, [metric], axis)
    drawn: set[int] = set()
    for place, (panel, panel_title) in enumerate(zip(panels, titles, strict=False)):
        drawn |= _panel(panel, lines, (metric, curve), axis, shared.unit, shared.is_logarithmic, panel_title)
        panel.set_title(panel_title, fontsize="medium")
        if place % columns == 0:
            panel.set_ylabel(curve.label)
        if place + columns >= len(titles):
            panel.set_xlabel(textwrap.fill(shared.label, LABEL_CHARACTERS))
            panel.tick_params(labelbottom=True)
    for panel in panels[len(titles) :]:
        panel.remove()
    if not drawn:
        raise UsageError(f"nothing to plot: no record of {metric} in {', '.join(line.label for line in lines)}")
    shared.limit(panels[0])
    if not paper:
        _title(figure, lines)
    first = {line.label: line for line in reversed(lines)}
    legend_of_lines(figure, [first[label] for label in dict.fromkeys(line.label for line in lines)], drawn)
    return figure


@dataclass(frozen=True)
class _SharedAxis:
    """The unit, range and label shared by all panels above one horizontal axis."""

    unit: float
    least: float
    """The first point above 0 of any line, in this unit."""
    most: float
    """The end of the longest line, in this unit."""
    is_logarithmic: bool
    """Whether the axis is logarithmic: on a linear one, lines that send much less than others would be invisible."""
    label: str

    def limit(self, panel: Axes) -> None:
        if self.is_logarithmic:
            panel.set_xscale("log")
            panel.set_xlim(0.9 * self.least, 1.1 * self.most)
            plain_log_labels(panel)
        else:
            panel.set_xlim(0, 1.02 * self.most if self.most else 1)


def _shared_axis(lines: Sequence[Line], metrics: Iterable[str], axis: str) -> _SharedAxis:
    positions = [x for line in lines for metric in metrics if (x := line.series(metric, axis).x)]
    ends, least = [max(x) for x in positions], min(_positive(itertools.chain(*positions)), default=0.0)
    if axis != "bytes":
        return _SharedAxis(1.0, least, max(ends, default=0.0), False, EVERY_AXIS[axis])
    unit, name = unit_of(ends)
    is_logarithmic = len(lines) > 1 and 0 < LOG_RATIO * min(ends, default=0.0) < max(ends, default=0.0)
    partial = any(run.num_nodes > len(run.nodes) for line in lines for run in line.runs)
    label = "payloads sent by the nodes here" if partial else EVERY_AXIS[axis]
    label += f" ({name})" if name else ""
    return _SharedAxis(unit, least / unit, max(ends, default=0.0) / unit, is_logarithmic, label)


def _panels(panels: Any, lines: Sequence[Line], metrics: Mapping[str, Curve], axes: Sequence[str]) -> set[int]:
    """Draws all panels. Returns the indices of the lines that appear in some panel."""
    drawn: set[int] = set()
    for column, axis in enumerate(axes):
        shared = _shared_axis(lines, metrics, axis)
        for row, (metric, curve) in enumerate(metrics.items()):
            panel = panels[row][column]
            drawn |= _panel(panel, lines, (metric, curve), axis, shared.unit, shared.is_logarithmic)
            shared.limit(panel)
        panels[-1][column].set_xlabel(shared.label)
    for row, curve in enumerate(metrics.values()):
        panels[row][0].set_ylabel(curve.label)
    return drawn


def plain_log_labels(panel: Axes) -> None:
    """Labels a logarithmic horizontal axis with plain numbers, as powers of ten with factors take too much space. If it
    spans little more than a decade, the multiples by 2 and 5 are labeled too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    left, right = panel.get_xlim()
    if right <= 30 * left:
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def _positive(values: Any) -> list[float]:
    """Returns the values above 0."""
    return [float(value) for value in values if value > 0]


def _panel(
    panel: Axes, lines: Sequence[Line], shown: tuple[str, Curve], axis: str, unit: float, positive: bool = False,
    panel_title: str | None = None,
) -> set[int]:
    """Draws all lines into one panel. unit: of the horizontal axis. positive: leave out points at 0, which a
    logarithmic axis cannot show. panel_title: draw the lines of this `panel`, with the scale that all lines need.
    Returns the indices of the lines that have values; the indices choose the colors."""
    metric, curve = shown
    labels = [*dict.fromkeys(line.label for line in lines)]
    numbers = [*range(len(lines))] if panel_title is None else [labels.index(line.label) for line in lines]

    def of(line: Line, merged: bool = False) -> tuple[Series, int]:
        """Returns the points to draw and the number of points before `positive` removed any. This number decides
        whether a line joins them, so that all panels of a figure agree."""
        series = line.series(metric, axis, merged)
        return (series.above(0.0) if positive else series), len(series.x)

    drawn = [(index, line, series) for index, line in zip(numbers, lines, strict=True) if (series := of(line)[0]).x]
    floor = _scale_end([values for _, _, series in drawn for values in (series.low, series.mean)])
    floor = floor if curve.logarithmic else None
    drawn = [each for each in drawn if panel_title is None or each[1].panel == panel_title]
    sizes: set[int] = set()
    for index, line, series in drawn:
        series, size = (series.reaching(floor) if floor else series).condensed(MAX_POINTS)
        sizes.add(size)
        color, x = color_of(index), [value / unit for value in series.x]
        count = of(line)[1]
        marker, dashes = "o" if len(x) <= 40 else None, dashes_of(index) if count > MAX_UNJOINED else "none"
        panel.plot(x, series.mean, linestyle=dashes, color=color, marker=marker, markersize=3, label=line.label)
        if curve.spread or len(line.runs) > 1:
            panel.fill_between(x, series.low, series.high, color=color, alpha=0.18, linewidth=0)
        of_merged, merged_count = of(line, merged=True)
        of_merged, _ = of_merged.condensed(MAX_POINTS)
        if curve.merged and of_merged.x:
            ends = merged_count <= MAX_UNJOINED < count
            panel.plot([value / unit for value in of_merged.x], of_merged.mean, color=color, markersize=4,
                       linestyle="none" if ends else "--", marker="D" if ends else None, label=MERGED)  # fmt: skip
    if (largest := max(sizes, default=1)) > 1:
        panel.text(0.99, 0.98, f"means of {'up to ' if len(sizes) > 1 else ''}{largest} consecutive values",
                   transform=panel.transAxes, ha="right", va="top", fontsize="x-small", color="#606060")  # fmt: skip
    if floor is not None:
        panel.set_yscale("log")
        if floor > 0:
            panel.set_ylim(bottom=floor)
    if axis == "rounds":
        integer_ticks(panel)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    return {index for index, _, _ in drawn}


def integer_ticks(panel: Axes) -> None:
    """Restricts the ticks of the horizontal axis to integers."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 5, 10)))


def _scale_end(curves: Sequence[Sequence[float]]) -> float | None:
    """Returns the lower end of a logarithmic scale, 0 to let the values determine it; None for a linear scale, if the
    values span less than a factor of 5 or are not positive. Before the first round all models are equal up to rounding:
    the scale does not extend to such tiny distances."""
    values = [value for curve in curves for value in curve]
    later = [value for curve in curves for value in curve[1:]] or values
    above = _positive(values)
    if not above or min(later) <= 0 or max(above) / min(above) <= 5:
        return None
    return min(later) / 2 if min(later) > 100 * min(values) else 0.0


def unit_of(largest: Sequence[float]) -> tuple[float, str]:
    """Returns (bytes, name) of the unit that suits the largest of some numbers of bytes."""
    most = max(largest, default=1.0)
    return next((unit for unit in UNITS if most >= unit[0]), UNITS[-1])


def _title(figure: Figure, lines: Sequence[Line]) -> None:
    """Writes the title: over what means and bands are taken, and the name of a single line."""
    several = sorted({len(line.runs) > 1 for line in lines})
    bands = {False: "band from lowest to highest node", True: "band of one standard deviation over seeds"}
    if len(lines) == 1:
        run = lines[0].runs[0]
        local, all_nodes = len(run.nodes), plural(run.num_nodes, "node")
        nodes_text = f"{local} of {all_nodes}, those of one machine" if local < run.num_nodes else all_nodes
        text = f"{lines[0].label}: mean of {nodes_text}, {bands[several[0]]}"
    elif len(several) == 1:
        text = f"mean of the nodes, {bands[several[0]]}"
    else:
        text = f"mean of the nodes; of several seeds {bands[True]}, of one run {bands[False]}"
    title(figure, text)


def title(figure: Figure, text: str) -> None:
    """Writes a title on as many lines as it needs. The figure grows by their height."""
    written = figure.suptitle(text, fontsize="medium")
    renderer, characters = figure.canvas.get_renderer(), len(text)  # type: ignore[attr-defined]
    height = written.get_window_extent(renderer).height
    while (box := written.get_window_extent(renderer)).width > WIDTH_SHARE * figure.bbox.width and characters > 8:
        characters = int(0.9 * characters)
        written.set_text(textwrap.fill(text, characters))
    figure.set_figheight(figure.get_figheight() + (box.height - height) / figure.dpi)


def legend(figure: Figure, handles: Sequence[Any], labels: list[str]) -> None:
    """Draws the legend below the panels, in as many columns as fit the width, to be read row by row. The figure grows
    by its height."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    room = WIDTH_SHARE * figure.bbox.width

    def drawn(columns: int, labels: list[str]) -> tuple[Any, Any]:
        rows_first = [place for column in range(columns) for place in range(column, len(labels), columns)]
        drawn_legend = figure.legend([handles[place] for place in rows_first], [labels[place] for place in rows_first],
                                     loc="outside lower center", ncols=columns, frameon=False)  # fmt: skip
        return drawn_legend, drawn_legend.get_window_extent(renderer)

    for columns in range(min(4, len(labels)), 0, -1):
        current, box = drawn(columns, labels)
        if box.width <= room:
            break
        if columns > 1:
            current.remove()
    else:  # not even one name fits the width
        characters = max(map(len, labels))
        while box.width > room and characters > 8:
            current.remove()
            characters = int(0.9 * characters)
            current, box = drawn(1, [textwrap.fill(label, characters) for label in labels])
    figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)


def legend_of_lines(figure: Figure, lines: Sequence[Line], drawn: Iterable[int]) -> None:
    """Writes the legend: every line that appears in a panel, in the order in which they end in the first panel, from
    top to bottom, and the meaning of dashes. drawn: indices of `lines`."""
    from matplotlib.lines import Line2D

    artists = [line for panel in figure.axes for line in panel.get_lines()]
    ends: dict[str, float] = {}
    for artist in artists:
        for y in [*artist.get_ydata()][-1:]:  # type: ignore[misc]
            if math.isfinite(y):
                ends.setdefault(str(artist.get_label()), float(y))
    merged = {str(line.get_linestyle()): line.get_marker() for line in artists if line.get_label() == MERGED}
    ordered = sorted(drawn, key=lambda index: (-ends.get(lines[index].label, -math.inf), index))
    handles = [Line2D([], [], color=color_of(index), linestyle=dashes_of(index)) for index in ordered]
    labels = [lines[index].label if len(lines) > 1 else "local models" for index in ordered]
    if merged:
        handles.append(Line2D([], [], color="#606060" if len(lines) > 1 else color_of(0),
                              linestyle="--" if "--" in merged else "none",
                              marker="D" if "D" in merged.values() else None, markersize=4))  # fmt: skip
        labels.append(MERGED)
    if len(labels) > 1:
        legend(figure, handles, labels)


def color_of(index: int) -> str:
    """Returns the color of a line."""
    return COLORS[index % len(COLORS)]


def dashes_of(index: int) -> Any:
    """Returns the line style of a line."""
    return DASHES[index // len(COLORS) % len(DASHES)]
