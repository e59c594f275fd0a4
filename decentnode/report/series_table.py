"""The numbers behind plots as CSV: a row per run, figure and round."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence

from decentnode.metrics.figures import VIRTUAL
from decentnode.report.reading.runs import Line, NodeValues, RecordedRun, chosen_curves

COLUMNS = ("run", "figure", "rounds", "seconds", "bytes", "mean", "std", "min", "max", "merged")


def csv_of(lines: Sequence[Line], metrics: Sequence[str]) -> str:
    """Returns CSV text: mean, standard deviation and extremes over the nodes, the value of the merged model, and a
    column per node, in the units of the plots' labels; also virtual seconds if a run has them. Repeats with other seeds
    have rows of their own. Raises UsageError for a figure that no run has."""
    chosen_curves(lines, metrics)
    runs = [run for line in lines for run in line.runs]
    uids = sorted({uid for run in runs for uid in run.nodes})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    virtual = any(run.virtual_seconds() for run in runs)
    split = COLUMNS.index("mean")
    node_columns = [f"node_{uid}" for uid in uids]
    writer.writerow([*COLUMNS[:split], *([VIRTUAL] if virtual else []), *COLUMNS[split:], *node_columns])
    for run in runs:
        for metric in metrics:
            writer.writerows(_rows(run, metric, uids, virtual))
    return out.getvalue()


def _rows(run: RecordedRun, metric: str, uids: Sequence[int], virtual: bool) -> Iterator[list[object]]:
    seconds, sent = (run.by_round(metric, axis) for axis in ("seconds", "bytes"))
    curve = run.measured.curves.get(metric)
    merged = run.by_round(metric, "rounds", merged=True) if curve is not None and curve.merged else {}
    virtual_at = run.virtual_seconds() if virtual else {}
    for rounds, by_uid in run.by_node(metric).items():
        values = NodeValues(value for value, _ in by_uid.values())
        values.pooled = seconds[rounds][1].pooled if rounds in seconds else None
        # Nodes with round counts of their own may report a round after others have finished the next: no common moment.
        moment = (seconds[rounds][0], int(sent[rounds][0])) if rounds in seconds else ("", "")
        yield [
            run.path.name, metric, rounds, *moment,
            *([virtual_at.get(rounds, "")] if virtual else []), values.mean,
            statistics.pstdev(values), min(values), max(values), merged[rounds][1][0] if rounds in merged else "",
            *(by_uid[uid][0] if uid in by_uid else "" for uid in uids),
        ]  # fmt: skip
