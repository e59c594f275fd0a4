"""Compares experiments: one row per config with mean and standard deviation over its seeds, as tables in several
formats."""

from __future__ import annotations

import csv
import io
import itertools
import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decentnode.metrics.figures import Figure
from decentnode.metrics.summary import num_senders
from decentnode.report.latex import tabular
from decentnode.report.reading.measured import DEFAULT_METRICS, columns
from decentnode.report.reading.reached import TO_TARGET, ExtraColumn
from decentnode.report.reading.repeats import Label, RunResult, labels_of, short_labels
from decentnode.report.reading.significance import Paired, holm, p_text, paired

PER_NODE = {"bytes_sent_per_node": "bytes_sent_total", "bytes_metadata_per_node": "bytes_metadata_total"}
NOT_FOR_PAPERS = ("consensus_rms", "consensus_distance", "bytes_metadata_per_node", "round_seconds_median")
"""Columns of comparisons that tables for papers omit."""
ALPHA = 0.05
"""The p-value below which a row counts as different from the best."""
MIN_LABEL = 32
"""Characters that a row's name may always have, even in a table that is too wide without it."""
MIN_LINE = 12
"""Minimum width of a name that is wrapped over several lines because no further column can be omitted."""
OMITTED_FIRST = ("bytes_metadata_per_node", "consensus_rms", "round_seconds_median", "consensus_distance")
"""Columns that are omitted first if a table is too wide, before those of the task and of payloads. The deviation over
the nodes is omitted even earlier."""


@dataclass(frozen=True)
class ComparedRow:
    """One experiment: for each figure the values of its runs, in the unit of the summary and the order of the seeds."""

    name: str
    runs: int
    values: Mapping[str, Sequence[float]]
    columns: Sequence[Figure]
    """The figures, in the order in which tables show them; the same for all rows of a table."""
    label: Label | None = None
    """The parts of `name`; None if it is no list of keys."""
    num_asked: int = 0
    """How many of the columns, the last ones, the user asked for: tables show them whatever their width."""

    def mean(self, name: str) -> float | None:
        return statistics.fmean(self.values[name]) if self.values[name] else None

    def deviation(self, name: str) -> float | None:
        """Returns the sample standard deviation; None for fewer than two runs."""
        return statistics.stdev(self.values[name]) if len(self.values[name]) > 1 else None

    @property
    def reached(self) -> int | None:
        """Returns how many of the runs reached the target; None if no target was asked for."""
        return len(self.values[TO_TARGET]) if TO_TARGET in self.values else None

    def shown(self, figure: Figure) -> str:
        mean, deviation = self.mean(figure.name), self.deviation(figure.name)
        if mean is None:
            return figure.absent if self.runs else "-"
        text = figure.shown(mean) if deviation is None else f"{figure.shown(mean)} ±{figure.shown(deviation)}"
        count = len(self.values[figure.name])
        return text if count == self.runs else f"{text} ({count} of {self.runs})"


def with_extra_columns(base: ComparedRow, runs: Sequence[RunResult], extra: Sequence[ExtraColumn]) -> ComparedRow:
    """Returns a row with additional columns after its own. runs: the runs that the row was made from."""
    extra_values = {figure.name: [value for each in runs if (value := value_of(each)) is not None]
                    for figure, value_of in extra}  # fmt: skip
    return replace(base, values={**base.values, **extra_values}, num_asked=len(extra),
                   columns=(*base.columns, *(each for each, _ in extra)))  # fmt: skip


def row(
    name: str, summaries: Sequence[Mapping[str, Any]], shown: Sequence[Figure] | None = None
) -> ComparedRow:
    """Returns a row. summaries: as in summary.json, one per seed. shown: the columns of the table; None: those of
    classification."""
    shown = columns([DEFAULT_METRICS]) if shown is None else shown
    return ComparedRow(name, len(summaries), {
        figure.name: [value for each in summaries if (value := _figure_value(each, figure)) is not None]
        for figure in shown
    }, shown)  # fmt: skip


def _figure_value(summary: Mapping[str, Any], figure: Figure) -> float | None:
    """Returns a figure of a summary; if the summary was written before the figure existed, it is computed from the
    nodes' values."""
    if figure.name in summary or figure.name in PER_NODE or not figure.of:
        return _value(summary, figure.name)
    return figure.combined(summary.get("nodes", {}).values())


def _value(summary: Mapping[str, Any], name: str) -> float | None:
    value = summary.get(PER_NODE.get(name, name))
    if not isinstance(value, int | float):
        return None
    return value / num_senders(summary) if name in PER_NODE else float(value)


def rows(groups: Sequence[Sequence[RunResult]], extra: Sequence[ExtraColumn] = ()) -> list[ComparedRow]:
    """Returns a row per group of repeats. extra: additional columns after those that all tables have."""
    shown = columns(dict.fromkeys(each.measured for group in groups for each in group))
    found = []
    for label, group in zip(labels_of(groups), groups, strict=True):
        made = row(label.text, [each.summary for each in group], shown)
        found.append(replace(with_extra_columns(made, group, extra), label=label))
    return found


@dataclass(frozen=True)
class AgainstBest:
    """The differences of rows from the best one in the tasks' main metric, paired by seed."""

    figure: Figure
    best: int
    """The index of the best row."""
    pairs: Sequence[Paired | None]
    """By row: the paired test of this row minus the best; None for the best, and with fewer than two seeds in
    common."""
    p: Sequence[float | None]
    """By row: the p-value, corrected for all comparisons together (Holm)."""

    def tied(self, row: int) -> bool:
        """Returns whether a row is the best or its difference from the best is not significant."""
        p = self.p[row]
        return row == self.best or (p is not None and p >= ALPHA)


def against_best(groups: Sequence[Sequence[RunResult]]) -> AgainstBest | None:
    """Compares experiments by a paired t-test over the seeds that two have in common. Returns None if their main
    metrics differ, or none has two seeds in common with the best."""
    mains = {each.measured.main.name for group in groups for each in group}
    if len(groups) < 2 or len(mains) != 1:
        return None
    measured = groups[0][0].measured
    figure, sign = measured.by_name[f"{measured.main.name}_mean"], 1 if measured.main.better == "higher" else -1
    values = [{each.seed: value for each in group if (value := _value(each.summary, figure.name)) is not None}
              for group in groups]  # fmt: skip
    with_values = [index for index, each in enumerate(values) if each]
    if not with_values:
        return None
    best = max(with_values, key=lambda index: sign * statistics.fmean(values[index].values()))
    pairs = [None if index == best else paired(each, values[best]) for index, each in enumerate(values)]
    if not any(pairs):
        return None
    return AgainstBest(figure, best, pairs, holm([None if each is None else each.p for each in pairs]))


def table_cells(
    rows: Sequence[ComparedRow], shown: Sequence[Figure], test: AgainstBest | None
) -> list[list[str]]:
    """Returns the headings and the rows as text."""
    tested = ["minus best", "p"] if test is not None else []
    cells = [["experiment", "runs", shown[0].title, *tested, *(figure.title for figure in shown[1:])]]
    for index, each in enumerate(rows):
        test_cells = []
        if test is not None:
            test_cells = [_difference(test, index), p_text(test.p[index])]
        cells.append([each.name, str(each.runs), each.shown(shown[0]), *test_cells, *map(each.shown, shown[1:])])
    return cells


def _difference(test: AgainstBest, index: int) -> str:
    pair = test.pairs[index]
    if pair is None:
        return ""
    each = [f"{test.figure.scale * value:+.{test.figure.digits}f}" for value in (pair.mean, pair.low, pair.high)]
    return f"{each[0]} [{each[1]}, {each[2]}]"


def text_table(rows: Sequence[ComparedRow], test: AgainstBest | None = None, width: int | None = None) -> str:
    """Returns a table in the simple format of reStructuredText, which a terminal can show too. rows: at least one.
    test: adds each row's difference from the best, its 95 % interval and p. width: desired maximum of characters per
    line. To meet it, headings may take two lines and names are shortened, but never below MIN_LABEL characters; if that
    is not enough, columns are omitted, which a line below the table names, and finally names are wrapped over several
    lines."""
    cells = table_cells(rows, rows[0].columns, test)
    if width is None or _width(cells) <= width:
        return simple_table(cells)
    shown, left_out = list(rows[0].columns), set[Figure]()
    cells = _narrow_cells(rows, shown, test, width)
    for figure in _omission_order(rows[0]):
        if _width(cells) <= width:
            break
        shown.remove(figure)
        left_out.add(figure)
        cells = _narrow_cells(rows, shown, test, width)
    if (over := _width(cells) - width) > 0:
        room = max(MIN_LINE, _widths(cells)[0] - over)
        cells = [cells[0], *(["\n".join(textwrap.wrap(line[0], room)), *line[1:]] for line in cells[1:])]
    if not left_out:
        return simple_table(cells)
    titles = ", ".join(figure.title for figure in rows[0].columns if figure in left_out)
    note = f"left out to fit {width} columns: {titles}; --wide shows them, and files (-o) have them"
    return f"{simple_table(cells)}\n{textwrap.fill(note, width)}"


def _omission_order(row: ComparedRow) -> list[Figure]:
    """Returns the columns that may be omitted, in the order of omission: never a task's mean or a column that the user
    asked for."""
    own = [each for each in row.columns[: len(row.columns) - row.num_asked] if not each.name.endswith("_mean")]
    first = [each for each in own if each.name.endswith("_deviation")]
    first += [each for name in OMITTED_FIRST for each in own if each.name == name]
    return [*first, *(each for each in reversed(own) if each not in first)]


def _narrow_cells(
    rows: Sequence[ComparedRow], shown: Sequence[Figure], test: AgainstBest | None, width: int
) -> list[list[str]]:
    """Returns the cells as `table_cells` does, with headings in two lines and names as long as the width allows."""
    cells = table_cells(rows, shown, test)
    cells[0] = [min((f"{heading[:at]}\n{heading[at + 1 :]}" for at, each in enumerate(heading) if each == " "),
                    key=lambda lines: max(map(len, lines.split("\n"))), default=heading) for heading in cells[0]]
    room = max(MIN_LABEL, width - _width([line[1:] for line in cells]) - 2)
    names = short_labels([each.label or Label(each.name, {}) for each in rows], room)
    return [cells[0], *([name, *line[1:]] for name, line in zip(names, cells[1:], strict=True))]


def _width(cells: Sequence[Sequence[str]]) -> int:
    """Returns the width of a simple table of these cells."""
    return sum(each + 2 for each in _widths(cells)) - 2


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(part) for line in cells for part in line[i].split("\n")) for i in range(len(cells[0]))]


def _for_papers(rows: Sequence[ComparedRow]) -> list[Figure]:
    """Returns the columns of tables for papers: those of the task, of payloads, and those that the user asked for."""
    return [each for each in rows[0].columns if each.name not in NOT_FOR_PAPERS]


def _bold(rows: Sequence[ComparedRow], test: AgainstBest | None) -> list[tuple[int, int]]:
    return [] if test is None else [(index, 2) for index in range(len(rows)) if test.tied(index)]


def latex_table(rows: Sequence[ComparedRow], test: AgainstBest | None = None) -> str:
    """Returns a LaTeX tabular (package booktabs). Bold are the best row and the rows whose difference from it is not
    significant."""
    return tabular(table_cells(rows, _for_papers(rows), test), 1, _bold(rows, test))


def markdown_table(rows: Sequence[ComparedRow], test: AgainstBest | None = None) -> str:
    """Returns the same table in Markdown."""
    cells, bold = table_cells(rows, _for_papers(rows), test), _bold(rows, test)
    lines = ["| " + " | ".join(cells[0]) + " |", "|" + "|".join([" :-- ", *(" --: " for _ in cells[0][1:])]) + "|"]
    for row, line in enumerate(cells[1:]):
        shown = [f"**{cell}**" if (row, column) in bold else cell.replace("|", "\\|")
                 for column, cell in enumerate(line)]  # fmt: skip
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def simple_table(cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a table in the simple format of reStructuredText. cells: the headings, then the rows, all of the same
    length. left: how many of the first columns are aligned left; the others are aligned right. Cells may have several
    lines; for valid reStructuredText, those of the first column must have one."""
    widths = _widths(cells)
    rule = "  ".join("=" * width for width in widths)

    def line(values: Sequence[str]) -> str:
        found = (value.ljust(width) if index < left else value.rjust(width)
                 for index, (value, width) in enumerate(zip(values, widths, strict=True)))  # fmt: skip
        return "  ".join(found).rstrip()

    headings, *lines = ("\n".join(map(line, itertools.zip_longest(*(cell.split("\n") for cell in row), fillvalue="")))
                        for row in cells)  # fmt: skip
    return "\n".join([rule, headings, rule, *lines, rule])


def csv_table(rows: Sequence[ComparedRow], test: AgainstBest | None = None) -> str:
    """Returns CSV text: means and deviations in columns of their own, in the units of the summary; with a test, each
    row's difference from the best, the ends of its interval and p."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    shown = rows[0].columns
    titles = [title for figure in shown for title in (figure.name, f"{figure.name}_std")]
    tested = ["minus_best", "minus_best_low", "minus_best_high", "p"] if test is not None else []
    targeted = ["reached"] if rows[0].reached is not None else []
    writer.writerow(["experiment", "runs", *titles, *targeted, *tested])
    for index, each in enumerate(rows):
        values = [value for figure in shown for value in (each.mean(figure.name), each.deviation(figure.name))]
        values += [each.reached] if targeted else []
        if test is not None:
            values += _test_values(test, index)
        writer.writerow([each.name, each.runs, *("" if value is None else f"{value:.9g}" for value in values)])
    return out.getvalue()


def _test_values(test: AgainstBest, index: int) -> list[float | None]:
    pair = test.pairs[index]
    return [None, None, None, None] if pair is None else [pair.mean, pair.low, pair.high, test.p[index]]


def as_json(rows: Sequence[ComparedRow], test: AgainstBest | None = None) -> str:
    """Returns all values as JSON text, by experiment and figure, in the units of the summary."""
    by_name: dict[str, dict[str, Any]] = {}
    for index, each in enumerate(rows):
        by_name[each.name] = {"runs": each.runs, **{name: list(values) for name, values in each.values.items()}}
        if test is not None:
            names = ("minus_best", "minus_best_low", "minus_best_high", "p")
            by_name[each.name] |= dict(zip(names, _test_values(test, index), strict=True))
    return json.dumps(by_name)
