"""Shared parts of the scripts that make the table of a page from a sweep."""

from __future__ import annotations

import argparse
import csv
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from common import machine

from decentnode.api.sweeps import Sweep

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "docs" / "tables"
Row = Mapping[str, str]
"""A row of a CSV file of a sweep, by heading."""
parse = functools.cache(yaml.safe_load)  # files have many rows with the same few sections, and parsing is slow


def parser_of(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that all of these scripts have. rounds: the default of `--rounds`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def rows_of(done: Sweep, name: str, values: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of one combination in points.csv or evaluations.csv, which have whole sections.

    values: key -> value or section, None for a section that is absent.
    """
    with (done.path / name).open(newline="") as file:
        return [row for row in csv.DictReader(file)
                if all(parse(row[key]) == wanted for key, wanted in values.items())]  # fmt: skip


def finished_points(done: Sweep, values: Mapping[str, Any], row: str, seeds: int) -> list[Row]:
    """Returns a row of points.csv per seed of one combination. Raises SystemExit if a seed has no accuracy.

    row: the name of the combination in the table.
    """
    here = rows_of(done, "points.csv", values)
    finished = [each for each in here if math.isfinite(float(each["accuracy_mean"] or "nan"))]
    if len(finished) != seeds or len(here) != seeds:
        sys.exit(f"{row}: {len(finished)} of {seeds} points have finished; see {done.path}")
    return finished


def mean(rows: Iterable[Row], figure: str) -> float:
    """Returns the mean of a figure over the seeds; NaN if a seed lacks it."""
    values = [float(row.get(figure) or "nan") for row in rows]
    return sum(values) / len(values)


def publish(table: str, parser: argparse.ArgumentParser, given: argparse.Namespace, path: Path | None) -> None:
    """Prints a table with the conditions under which it was made, and writes both to its file, unless there are other
    seeds or rounds than usual. path: None if the table belongs to no page."""
    text = f"{table}\n\n{machine()}, seeds 1 to {given.seeds}\n"
    print(text)
    if path is not None and all(getattr(given, name) == parser.get_default(name) for name in ("seeds", "rounds")):
        path.write_text(text)
