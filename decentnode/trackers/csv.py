"""The tracker `csv`: writes points to a CSV file, a row per figure: RUN/trackers/points.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any

from decentnode.config import component
from decentnode.trackers.base import Point, TrackedRun, Tracker

COLUMNS = ("round", "time", "figure", "value")


class CSV(Tracker):
    """Appends a row per figure and round to RUN/trackers/points.csv, which any spreadsheet program can read during the
    run."""

    def __init__(self, config: component.Config, run: TrackedRun) -> None:
        super().__init__(config, run)
        self._path = run.folder / "points.csv"
        self._file = open(self._path, "w", newline="", encoding="utf-8")  # noqa: SIM115
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(COLUMNS)

    @property
    def place(self) -> str:
        return str(self._path)

    def log(self, point: Point) -> None:
        self._writer.writerows((point.round, f"{point.time:.3f}", name, f"{value:.9g}")
                               for name, value in point.values.items())  # fmt: skip
        self._file.flush()

    def close(self, summary: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        self._file.close()
