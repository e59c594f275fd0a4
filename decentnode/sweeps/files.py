"""Writes the tables and the plot of a sweep's results into its folder."""

from __future__ import annotations

from pathlib import Path

from decentnode.errors import EnvironmentFault
from decentnode.sweeps.evaluations import evaluations_csv
from decentnode.sweeps.picture import plot
from decentnode.sweeps.results import Results, csv_table, latex_table, points_csv, text_table
from decentnode.system import write_atomic

TABLES = {"results.txt": text_table, "results.csv": csv_table, "points.csv": points_csv,
          "evaluations.csv": evaluations_csv, "results.tex": latex_table}  # fmt: skip
PICTURE = "results.png"


def write(results: Results, folder: Path) -> list[Path]:
    """Writes the tables, and the plot if a point has finished. Returns their paths. Raises EnvironmentFault."""
    written = []
    for name, make in TABLES.items():
        try:
            write_atomic(folder / name, make(results).rstrip("\n") + "\n")
        except OSError as error:
            raise EnvironmentFault(f"cannot write {folder / name}: {error.strerror}") from error
        written.append(folder / name)
    if results.best is not None:
        plot(results, folder / PICTURE)
        written.append(folder / PICTURE)
    return written
