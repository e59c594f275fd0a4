"""The results of a sweep: a row per combination with means and deviations over its seeds, significance tests, and
tables."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decentnode.errors import UsageError
from decentnode.metrics import summary as summaries
from decentnode.metrics.figures import Figure, TaskMetrics
from decentnode.report.compare import ComparedRow, row, simple_table, with_extra_columns
from decentnode.report.latex import tabular
from decentnode.report.reading import repeats
from decentnode.report.reading.measured import DEFAULT_METRICS, columns, metrics_of_summary
from decentnode.report.reading.reached import ExtraColumn, target_columns
from decentnode.report.reading.repeats import RunResult
from decentnode.report.reading.significance import Paired, holm, p_text, paired
from decentnode.sweeps.conduct import Ended, State
from decentnode.sweeps.plan import Sweep
from decentnode.sweeps.point import label_of
from decentnode.sweeps.space import Settings, short_names, short_values, value_at

ALPHA = 0.05
"""Differences with a larger p-value count as not significant."""


@dataclass(frozen=True)
class Row:
    """One combination of values; with halving, at the last rung that it reached."""

    settings: Settings
    rounds: int
    values: Mapping[int | None, float]
    """The sweep's metric by seed, in the unit of the summary; the key None is the experiment's own seed."""
    compared: ComparedRow
    """All figures that `decentnode compare` shows."""
    ended: tuple[Ended, ...]
    """One per seed, unfinished ones included."""
    against: Paired | None = None
    """The paired test of this row minus the best one, or the best of its group. None for the best row itself, for rows
    with fewer rounds, and for rows with fewer than two seeds in common with it."""
    p: float | None = None
    """The p-value of `against`, corrected for the number of comparisons in the whole table (Holm)."""
    leads: bool = False
    """Whether this is the best row, or the best of its group, with which others are compared."""
    whole: bool = True
    """Whether every seed has a value."""

    @property
    def label(self) -> str:
        return label_of(self.settings)

    @property
    def mean(self) -> float | None:
        return self.compared.mean(self.metric)

    @property
    def deviation(self) -> float | None:
        return self.compared.deviation(self.metric)

    @property
    def metric(self) -> str:
        return self.compared.columns[0].name

    @property
    def not_finished(self) -> list[Ended]:
        return [each for each in self.ended if each.outcome.status != "finished"]

    @property
    def tied(self) -> bool:
        """Whether its difference from the best row is not significant."""
        return self.p is not None and self.p > ALPHA

    @property
    def worse(self) -> bool:
        """Whether it is significantly worse than the best row."""
        return self.p is not None and self.p <= ALPHA


@dataclass(frozen=True)
class Results:
    """The rows of a sweep, best first. Rows that halving stopped early come after those that went further; rows that
    lack the value of a seed come after those that have all."""

    name: str
    folder: Path
    """The sweep's folder, which contains its points and the files of its results."""
    metric: Figure
    rows: tuple[Row, ...]
    partial: bool
    """Whether the sweep was stopped before its end."""
    best_by: tuple[str, ...] = ()
    """Keys: tables show only the best row for each combination of their values; all rows if empty."""
    better: str = "higher"
    """Which values of the metric are better: "higher" or "lower"."""
    within: tuple[str, ...] = ()
    """Keys that divide the rows into groups, each compared with the best of its group; one group if empty."""
    extra: tuple[ExtraColumn, ...] = ()
    """Columns that the user asked for."""

    @property
    def best(self) -> Row | None:
        return next((each for each in self.rows if each.mean is not None), None)


def results_of(state: State) -> Results:
    """Returns the results of a sweep, as far as it has run."""
    sweep = state.sweep
    metric = sweep.measured.by_name[sweep.metric]
    latest = {(each.point.settings, each.point.seed): each for each in state.ended}
    groups: dict[Settings, list[Ended]] = {}
    for each in latest.values():
        groups.setdefault(each.point.settings, []).append(each)
    runs = [run for each in latest.values() if (run := _read_run(each, sweep.measured)) is not None]
    # A swept key may add a metric that the experiment itself does not have, such as epsilon.
    own = [metrics_of_summary(each.summary) for each in runs if "task" in each.summary]
    measured = dict.fromkeys((sweep.measured, *own))
    shown = (metric, *(each for each in columns(measured) if each.name != metric.name))
    extra = _target_columns(sweep, runs)
    rows = [_row(settings, group, shown, sweep, extra) for settings, group in groups.items()]
    rows.sort(key=lambda each: (-each.rounds, each.mean is None, not each.whole, sweep.sign * (each.mean or 0.0)))
    ordered = [each for group in _groups(rows, sweep.plan.within).values() for each in group]
    tested = tuple(_with_tests(ordered, sweep.plan.within))
    return Results(sweep.name, sweep.folder, metric, tested, state.exit_code > 128, sweep.plan.best_by,
                   "lower" if sweep.sign > 0 else "higher", sweep.plan.within, extra)


def _target_columns(sweep: Sweep, runs: Sequence[RunResult]) -> tuple[ExtraColumn, ...]:
    """Returns the columns of the sweep's target. After halving they lack the seconds, as other points ran between its
    rungs."""
    if sweep.plan.target is None or not runs:
        return ()
    return tuple(each for each in target_columns(runs, sweep.plan.target)
                 if not (sweep.rungs and each[0].name == "seconds_to_target"))  # fmt: skip


def _row(
    settings: Settings, group: Sequence[Ended], shown: Sequence[Figure], sweep: Sweep, extra: Sequence[ExtraColumn]
) -> Row:
    group = sorted(group, key=lambda each: -1 if each.point.seed is None else each.point.seed)
    furthest = max(each.point.rounds or sweep.rounds for each in group)
    complete = [each for each in group if each.run is not None and each.outcome.status == "finished"
                and (each.point.rounds or sweep.rounds) == furthest]  # fmt: skip
    runs = [ran for each in complete if (ran := _read_run(each, sweep.measured)) is not None]
    values = {each.point.seed: each.value for each in complete if each.value is not None}
    compared = with_extra_columns(row(label_of(settings), [ran.summary for ran in runs], shown), runs, extra)
    return Row(settings, furthest, values, compared, tuple(group),
               whole=len(values) == max(len(group), sweep.plan.seeds or 1))  # fmt: skip


def _read_run(ended: Ended, measured: TaskMetrics = DEFAULT_METRICS) -> RunResult | None:
    """Returns a point's run with what tables need of it; None if it left no run."""
    if ended.run is None:
        return None
    try:
        summary = summaries.read(ended.run / "summary.json")
    except (OSError, ValueError):
        summary = {}
    return RunResult(ended.run, "", ended.point.seed, {}, ended.outcome.status, summary, measured)


def _groups(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    """Returns the rows grouped by their values of these keys, groups in the order of their first row; one group without
    keys."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for each in rows:
        groups.setdefault(tuple(value_at(each.settings, key) for key in keys), []).append(each)
    return groups


def _with_tests(rows: Sequence[Row], within: Sequence[str]) -> list[Row]:
    """Returns the rows with the paired test of each row that ran as many rounds as the best of its group, against that
    best."""
    bests = {values: next((each for each in group if each.mean is not None), None)
             for values, group in _groups(rows, within).items()}  # fmt: skip
    row_bests = [bests[tuple(value_at(each.settings, key) for key in within)] for each in rows]
    tests = [None if best is None or each is best or each.rounds != best.rounds
             else paired(each.values, best.values) for each, best in zip(rows, row_bests, strict=True)]  # fmt: skip
    corrected = holm([None if each is None else each.p for each in tests])
    return [replace(each, against=pair, p=p, leads=each is best)
            for each, best, pair, p in zip(rows, row_bests, tests, corrected, strict=True)]  # fmt: skip


def best_of_each(results: Results) -> tuple[list[Row], list[str]]:
    """Returns (the best row for each combination of the values of `best_by`, in the order of the rows; notes on these
    rows, in sentences). A row that lacks the value of a seed is never the best; among equal ones the first is."""
    names = short_names(results.best_by)
    groups = _groups(results.rows, results.best_by)
    short = [short_values(column) for column in zip(*groups, strict=True)]
    short_of = _short_by_key(results.rows)
    metric, largest = results.metric, "largest" if results.better == "higher" else "smallest"
    notes = [f"the best for each {' and '.join(names.values())}: the {largest} mean over the seeds of "
             f"{metric.title or metric.name} after the last round"]  # fmt: skip
    best = []
    for values, rows in groups.items():
        values_text = " ".join(f"{name}={texts[value]}"
                               for name, value, texts in zip(names.values(), values, short, strict=True))  # fmt: skip
        complete = [each for each in rows if each.whole]
        best += complete[:1]
        if not complete:
            notes.append(f"{values_text}: no combination has finished with every seed")
        elif len(equal := [label_of(each.settings, short=short_of) for each in complete
                           if (each.rounds, each.mean) == (complete[0].rounds, complete[0].mean)]) > 1:  # fmt: skip
            notes.append(f"{values_text}: as good as {equal[0]}, which stands first: {'; '.join(equal[1:])}")
    return best, notes


# -- tables ---------------------------------------------------------------------------------------------------


def keys_of(results: Results) -> dict[str, str]:
    """Returns the short name of every key, in the order of the axes."""
    keys = dict.fromkeys(key for each in results.rows for key, _ in each.settings)
    return short_names([*keys])


def short_settings(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns for each row its values by key, shortened as far as they still differ from those of the other rows."""
    short = _short_by_key(rows)
    return [{key: short[key][value] for key, value in each.settings} for each in rows]


def _short_by_key(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Returns for each key the short texts of its values in these rows."""
    keys = dict.fromkeys(key for each in rows for key, _ in each.settings)
    return {key: short_values(value for each in rows for name, value in each.settings if name == key) for key in keys}


def _shown_rows(results: Results) -> list[Row]:
    """Returns the rows that tables show: all but those whose experiments were invalid, or the best ones only
    (`best_by`)."""
    if results.best_by:
        return best_of_each(results)[0]
    return [each for each in results.rows if any(ended.outcome.status != "invalid" for ended in each.ended)]


def _cells(results: Results) -> list[list[str]]:
    names, rows = keys_of(results), _shown_rows(results)
    halved = len({each.rounds for each in rows}) > 1
    tested = any(each.against is not None for each in rows)
    shown = rows[0].compared.columns
    head = [*names.values(), *(["rounds"] if halved else []), "runs", shown[0].title or shown[0].name]
    head += [*(["minus best", "p"] if tested else []), *(each.title for each in shown[1:])]
    cells = [head]
    for each, values in zip(rows, short_settings(rows), strict=True):
        line = [*(values.get(key, "") for key in names), *([str(each.rounds)] if halved else []), _runs(each)]
        line.append(each.compared.shown(shown[0]))
        if tested:
            line += [_difference(each, shown[0]), p_text(each.p)]
        cells.append([*line, *(each.compared.shown(figure) for figure in shown[1:])])
    return cells


def _runs(row: Row) -> str:
    finished = len(row.ended) - len(row.not_finished)
    return str(finished) if finished == len(row.ended) else f"{finished} of {len(row.ended)}"


def _difference(row: Row, figure: Figure) -> str:
    pair = row.against
    if pair is None:
        return ""
    mean, low, high = (f"{figure.scale * each:+.{figure.digits}f}" for each in (pair.mean, pair.low, pair.high))
    return f"{mean} [{low}, {high}]"


def text_table(results: Results) -> str:
    """Returns a readable table in the simple format of reStructuredText, with notes below it. If no point has ended,
    returns a line that says so."""
    if not results.rows:
        return "no point has ended"
    table = [simple_table(_cells(results), left=len(keys_of(results)))] if _shown_rows(results) else []
    notes = best_of_each(results)[1] if results.best_by else []
    if results.within and any(each.against is not None for each in results.rows):
        keys = " and ".join(short_names(results.within).values())
        notes = [f"minus best: the best of the same {keys}; p holds for all these comparisons together", *notes]
    return "\n".join([*table, *notes]) or "no point has ended"


def csv_table(results: Results) -> str:
    """Returns CSV text of the rows: values in the units of the summary, a column per key and figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rows = frame_rows(results)
    if rows:
        writer.writerow([*rows[0]])
        writer.writerows([["" if value is None else value for value in each.values()] for each in rows])
    return out.getvalue()


def frame_rows(results: Results) -> list[dict[str, Any]]:
    """Returns a dict per combination: its values by key, its number of runs, mean and deviation of every figure, and
    the result of the paired test."""
    lines = []
    keys = keys_of(results)
    for each in _shown_rows(results) if results.best_by else results.rows:
        settings, test = dict(each.settings), each.against
        line: dict[str, Any] = {key: settings.get(key) for key in keys}
        line |= {"rounds": each.rounds, "runs": each.compared.runs, "not_finished": len(each.not_finished)}
        for figure in each.compared.columns:
            line[figure.name] = each.compared.mean(figure.name)
            line[f"{figure.name}_std"] = each.compared.deviation(figure.name)
        if results.extra:
            line["reached"] = each.compared.reached
        line |= {"minus_best": test and test.mean, "minus_best_low": test and test.low,
                 "minus_best_high": test and test.high, "p": each.p}  # fmt: skip
        lines.append(line)
    return lines


def point_rows(results: Results) -> list[dict[str, Any]]:
    """Returns a dict per point: its values by key, its seed, how it ended, its figures and its run's folder."""
    lines = []
    keys = keys_of(results)
    for each in results.rows:
        for ended in each.ended:
            settings = dict(ended.point.settings)
            line: dict[str, Any] = {key: settings.get(key) for key in keys}
            ran = _read_run(ended)
            summary = {} if ran is None else ran.summary
            line |= {"seed": seed_of(ended), "status": ended.outcome.status, "rounds": summary.get("rounds")}
            line |= {name: one[0] for name, one in row("", [summary], each.compared.columns).values.items() if one}
            if ran is not None and ended.outcome.status == "finished":
                line |= {figure.name: value for figure, of in results.extra if (value := of(ran)) is not None}
            line |= {"seconds": ended.outcome.seconds, "why": ended.outcome.title,
                     "run": "" if ended.run is None else str(ended.run), "digest": ended.digest}  # fmt: skip
            lines.append(line)
    return lines


def seed_of(ended: Ended) -> Any:
    """Returns the seed of a point; for a point with the experiment's own seed, the one recorded in its run."""
    if ended.point.seed is not None or ended.run is None:
        return ended.point.seed
    try:
        return repeats.read(ended.run).seed
    except UsageError:  # the run was removed
        return None


def points_csv(results: Results) -> str:
    """Returns CSV text of the points. The folders of runs are relative to the sweep's folder, so that it may be
    moved."""
    out = io.StringIO()
    rows = [{**each, "run": each["run"] and os.path.relpath(each["run"], results.folder)}
            for each in point_rows(results)]  # fmt: skip
    names = [*dict.fromkeys(name for each in rows for name in each)]
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def latex_table(results: Results) -> str:
    """Returns a LaTeX tabular (package booktabs): keys, runs, the metric, the difference from the best row, and the
    columns that the user asked for. Bold are the best row, of every group if rows are compared within groups, and the
    rows whose difference from it is not significant."""
    if not _shown_rows(results):
        return "% no point has ended\n"
    keys, cells = len(keys_of(results)), _cells(results)
    last = cells[0].index("p") + 1 if "p" in cells[0] else cells[0].index("runs") + 2
    place = cells[0].index("runs") + 1
    bold = [(row, place) for row, each in enumerate(_shown_rows(results)) if each.leads or each.tied]
    return tabular([line[:last] + line[len(line) - len(results.extra) :] for line in cells], keys, bold)
