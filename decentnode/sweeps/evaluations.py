"""Every evaluation of every point of a sweep as one long table, for pandas or plotting."""

from __future__ import annotations

import csv
import io
import os
import statistics
from collections.abc import Iterator
from typing import Any

from decentnode.errors import UsageError
from decentnode.metrics.figures import VIRTUAL
from decentnode.report.reading.runs import RecordedRun, load
from decentnode.sweeps.results import Results, keys_of, seed_of

OF_ROUNDS = {"loss": "training_loss", "gradient_norm": "gradient_norm"}
"""Curves of rounds -> their columns, which hold the mean over the nodes in the round before the evaluation. The plain
name `loss` is the loss of an evaluation, as in summary.json."""


def evaluation_rows(results: Results) -> Iterator[dict[str, Any]]:
    """Yields a dict per point and evaluation, in the order of points and rounds, with the names and units of
    summary.json: means, extremes and the value of the merged model. Points without a run, and runs whose records were
    removed, yield nothing."""
    keys = keys_of(results)
    for each in results.rows:
        for ended in each.ended:
            if ended.run is None:
                continue
            try:
                run = load(ended.run)
            except (OSError, UsageError):
                continue
            settings = dict(ended.point.settings)
            point = {"experiment": results.name, **{key: settings.get(key) for key in keys}, "seed": seed_of(ended),
                     "status": ended.outcome.status}  # fmt: skip
            for figures in _evaluations(run):
                yield {**point, **figures, "run": str(ended.run)}


def _evaluations(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Yields the figures of each evaluation of a run, in the order of rounds."""
    curves, virtual = run.measured.curves, run.virtual_seconds()
    by_curve = {name: run.by_node(name) for name in curves}
    merged = {name: run.by_node(name, merged=True) for name, curve in curves.items() if curve.merged}
    evaluated = [name for name, curve in curves.items() if curve.kind == "evaluation" and by_curve[name]]
    positions = {name: {axis: run.by_round(name, axis) for axis in ("seconds", "bytes")} for name in evaluated}
    for rounds in sorted({rounds for name in evaluated for rounds in by_curve[name]}):
        present = [name for name in evaluated if rounds in positions[name]["seconds"]]
        if not present:  # nodes with round counts of their own: there is no common moment
            continue
        first_positions = positions[present[0]]
        line: dict[str, Any] = {"round": rounds, "seconds": first_positions["seconds"][rounds][0],
                                "bytes": int(first_positions["bytes"][rounds][0])}  # fmt: skip
        if virtual:
            line[VIRTUAL] = virtual.get(rounds)
        for name in present:
            key, scale, values = curves[name].key, curves[name].scale, positions[name]["seconds"][rounds][1]
            if not curves[name].spread:
                line[key] = values.mean / scale
                continue
            figures = {"mean": values.mean, "min": min(values), "max": max(values)}
            line |= {f"{key}_{which}": value / scale for which, value in figures.items()}
            if node_values := merged.get(name, {}).get(rounds):
                line[f"{key}_merged"] = next(iter(node_values.values()))[0] / scale
        for name, column in OF_ROUNDS.items():
            if node_values := by_curve[name].get(rounds):
                line[column] = statistics.fmean(value for value, _ in node_values.values())
        yield line


def evaluations_csv(results: Results) -> str:
    """Returns `evaluation_rows` as CSV text. The folders of runs are relative to the sweep's folder, so that it may be
    moved."""
    out = io.StringIO()
    rows = [{**each, "run": os.path.relpath(each["run"], results.folder)} for each in evaluation_rows(results)]
    names = [*dict.fromkeys(name for each in rows for name in each)]
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    if names:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
