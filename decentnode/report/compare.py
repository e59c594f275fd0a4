"""Runs side by side: one row per experiment, mean and standard deviation over its seeds."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decentnode.errors import UsageError


@dataclass(frozen=True)
class Column:
    """One figure of a summary. scale: shown value per value; digits: behind the point."""

    key: str
    title: str
    scale: float = 1.0
    digits: int = 2
    per_node: bool = False


COLUMNS = (
    Column("accuracy_mean", "accuracy %", 100.0),
    Column("accuracy_min", "worst node %", 100.0),
    Column("accuracy_merged", "merged %", 100.0),
    Column("consensus_rms", "distance", digits=3),
    Column("bytes_sent_total", "MB/node", 1e-6, per_node=True),
    Column("bytes_metadata_total", "metadata", 1e-6, per_node=True),
    Column("round_seconds_median", "ms/round", 1e3, digits=1),
)


@dataclass(frozen=True)
class Row:
    """An experiment: per column the values of its runs, in the order of the seeds."""

    name: str
    runs: int
    values: Mapping[str, Sequence[float]]

    def mean(self, key: str) -> float | None:
        return statistics.fmean(self.values[key]) if self.values[key] else None

    def deviation(self, key: str) -> float | None:
        """Standard deviation of the sample; None below two runs."""
        return statistics.stdev(self.values[key]) if len(self.values[key]) > 1 else None

    def shown(self, column: Column) -> str:
        mean, deviation = self.mean(column.key), self.deviation(column.key)
        if mean is None:
            return "-"
        text = f"{mean:.{column.digits}f}"
        return text if deviation is None else f"{text} ±{deviation:.{column.digits}f}"


def row(name: str, summaries: Sequence[Mapping[str, Any]]) -> Row:
    """summaries: as in summary.json, one per seed."""
    values: dict[str, list[float]] = {}
    for column in COLUMNS:
        nodes = [max(1, len(summary.get("nodes", {}))) if column.per_node else 1 for summary in summaries]
        values[column.key] = [
            column.scale * float(value) / n
            for summary, n in zip(summaries, nodes, strict=True)
            if isinstance(value := summary.get(column.key), int | float)
        ]
    return Row(name, len(summaries), values)


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Rows of finished runs, grouped by the experiment's name. Raises UsageError for a folder without a summary."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        try:
            summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} has no readable summary.json: the run is not finished") from error
        found.setdefault(str(summary.get("name") or path.parent.name), []).append(summary)
    return [row(name, summaries) for name, summaries in found.items()]


def text_table(rows: Sequence[Row]) -> str:
    """For a terminal or a page of reStructuredText: a simple table."""
    cells = [["experiment", "runs", *(column.title for column in COLUMNS)]]
    cells += [[each.name, str(each.runs), *(each.shown(column) for column in COLUMNS)] for each in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    rule = "  ".join("=" * width for width in widths)

    def line(values: Sequence[str]) -> str:
        first, *rest = (value.ljust(w) if i == 0 else value.rjust(w)
                        for i, (value, w) in enumerate(zip(values, widths, strict=True)))  # fmt: skip
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([rule, line(cells[0]), rule, *(line(values) for values in cells[1:]), rule])


def csv_table(rows: Sequence[Row]) -> str:
    """Means and deviations in columns of their own, for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    titles = [title for column in COLUMNS for title in (column.key, f"{column.key}_std")]
    writer.writerow(["experiment", "runs", *titles])
    for each in rows:
        figures = [value for column in COLUMNS for value in (each.mean(column.key), each.deviation(column.key))]
        writer.writerow([each.name, each.runs, *("" if value is None else f"{value:.6g}" for value in figures)])
    return out.getvalue()


def as_json(rows: Sequence[Row]) -> str:
    """All values, by experiment and column."""
    return json.dumps({each.name: {"runs": each.runs, **{k: list(v) for k, v in each.values.items()}} for each in rows})
