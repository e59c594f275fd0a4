"""Experiments side by side: one row per config, mean and standard deviation over its seeds."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decentnode.metrics.figures import Figure
from decentnode.report.measured import BEFORE, columns
from decentnode.report.repeats import Ran, labels

PER_NODE = {"bytes_sent_per_node": "bytes_sent_total", "bytes_metadata_per_node": "bytes_metadata_total"}
MAX_LABEL = 60
"""Most characters of a row's name in the table for people."""


@dataclass(frozen=True)
class ComparedRow:
    """One experiment: for each figure the values of its runs, in the figure's unit and the order of the seeds."""

    name: str
    runs: int
    values: Mapping[str, Sequence[float]]
    columns: Sequence[Figure]
    """The figures, in the order in which tables show them; the same for all rows of a table."""

    def mean(self, name: str) -> float | None:
        return statistics.fmean(self.values[name]) if self.values[name] else None

    def deviation(self, name: str) -> float | None:
        """Returns the sample standard deviation; None for fewer than two runs."""
        return statistics.stdev(self.values[name]) if len(self.values[name]) > 1 else None

    def shown(self, figure: Figure) -> str:
        mean, deviation = self.mean(figure.name), self.deviation(figure.name)
        if mean is None:
            return "-"
        return figure.shown(mean) if deviation is None else f"{figure.shown(mean)} ±{figure.shown(deviation)}"


def row(
    name: str, summaries: Sequence[Mapping[str, Any]], shown: Sequence[Figure] | None = None
) -> ComparedRow:
    """Makes a row. summaries: as in summary.json, one per seed. shown: the columns of the table, those of
    classification when None."""
    shown = columns([BEFORE]) if shown is None else shown
    return ComparedRow(name, len(summaries), {
        figure.name: [value for each in summaries if (value := _value(each, figure.name)) is not None]
        for figure in shown
    }, shown)  # fmt: skip


def _value(summary: Mapping[str, Any], name: str) -> float | None:
    value = summary.get(PER_NODE.get(name, name))
    if not isinstance(value, int | float):
        return None
    return value / max(1, len(summary.get("nodes", {}))) if name in PER_NODE else float(value)


def rows(groups: Sequence[Sequence[Ran]]) -> list[ComparedRow]:
    """Returns a row per group of repeats."""
    named = zip(labels(groups), groups, strict=True)
    shown = columns(dict.fromkeys(each.measured for group in groups for each in group))
    return [row(label, [each.summary for each in group], shown) for label, group in named]


def text_table(rows: Sequence[ComparedRow]) -> str:
    """Returns a simple table of reStructuredText, which a terminal can show too. rows: at least one."""
    shown = rows[0].columns
    cells = [["experiment", "runs", *(figure.title for figure in shown)]]
    names = [each.name if len(each.name) <= MAX_LABEL else f"{each.name[: MAX_LABEL - 4]} ..." for each in rows]
    if len(set(names)) < len(names):
        names = [each.name for each in rows]
    cells += [
        [name, str(each.runs), *(each.shown(figure) for figure in shown)]
        for name, each in zip(names, rows, strict=True)
    ]
    return simple_table(cells)


def simple_table(cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a simple table of reStructuredText. cells: the headings, then the rows, equally many each. left: how many
    of the first columns are flush left; the others are flush right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    rule = "  ".join("=" * width for width in widths)

    def line(values: Sequence[str]) -> str:
        found = (value.ljust(width) if index < left else value.rjust(width)
                 for index, (value, width) in enumerate(zip(values, widths, strict=True)))  # fmt: skip
        return "  ".join(found).rstrip()

    return "\n".join([rule, line(cells[0]), rule, *(line(values) for values in cells[1:]), rule])


def csv_table(rows: Sequence[ComparedRow]) -> str:
    """Returns CSV text for other programs: means and deviations in columns of their own, in the figures' units."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    shown = rows[0].columns
    titles = [title for figure in shown for title in (figure.name, f"{figure.name}_std")]
    writer.writerow(["experiment", "runs", *titles])
    for each in rows:
        found = [value for figure in shown for value in (each.mean(figure.name), each.deviation(figure.name))]
        writer.writerow([each.name, each.runs, *("" if value is None else f"{value:.9g}" for value in found)])
    return out.getvalue()


def as_json(rows: Sequence[ComparedRow]) -> str:
    """Returns all values, by experiment and figure, in the figures' units."""
    return json.dumps({each.name: {"runs": each.runs, **{k: list(v) for k, v in each.values.items()}} for each in rows})
