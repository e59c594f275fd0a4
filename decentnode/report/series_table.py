"""The numbers behind plots, as CSV: a row per run, figure and round."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence

from decentnode.report.runs import Line, RecordedRun, chosen_curves

COLUMNS = ("run", "figure", "rounds", "seconds", "bytes", "mean", "std", "min", "max", "merged")


def csv_of(lines: Sequence[Line], metrics: Sequence[str]) -> str:
    """Returns CSV text: mean, standard deviation and extremes over the nodes, the value of the merged model, and a
    column per node, in the units of the plots' labels. Repeats with other seeds have rows of their own. Raises
    UsageError for a figure that no run has."""
    chosen_curves(lines, metrics)
    runs = [run for line in lines for run in line.runs]
    uids = sorted({uid for run in runs for uid in run.nodes})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"node_{uid}" for uid in uids)])
    for run in runs:
        for metric in metrics:
            writer.writerows(_rows(run, metric, uids))
    return out.getvalue()


def _rows(run: RecordedRun, metric: str, uids: Sequence[int]) -> Iterator[list[object]]:
    seconds, sent = (run.by_round(metric, axis) for axis in ("seconds", "bytes"))
    curve = run.measured.curves.get(metric)
    merged = run.by_round(metric, "rounds", merged=True) if curve is not None and curve.merged else {}
    for rounds, told in run.by_node(metric).items():
        values = [value for value, _ in told.values()]
        yield [
            run.path.name, metric, rounds, seconds[rounds][0], int(sent[rounds][0]), statistics.fmean(values),
            statistics.pstdev(values), min(values), max(values), merged[rounds][1][0] if rounds in merged else "",
            *(told[uid][0] if uid in told else "" for uid in uids),
        ]  # fmt: skip
