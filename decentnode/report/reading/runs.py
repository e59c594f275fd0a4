"""Reads runs from their directories as series to draw. Repeats of one experiment make one line."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decentnode.errors import UsageError
from decentnode.metrics.figures import AXES, VIRTUAL, VIRTUAL_FILE, Curve, TaskMetrics, curve_name
from decentnode.metrics.reader import SentPayloads, read
from decentnode.report.reading import repeats
from decentnode.report.reading.furthest import ValuesByRound, are_out_of_step, by_furthest, virtual_by_round
from decentnode.report.reading.machine_clocks import clock_errors
from decentnode.report.reading.measured import DEFAULT_METRICS, metrics_of_run
from decentnode.report.reading.repeats import RunResult
from decentnode.similar_words import did_you_mean

__all__ = [
    "AXES", "Line", "RecordedRun", "Series", "axes_of", "chosen_curves", "curves_of", "lines", "load", "overview",
]  # fmt: skip


SUMMED = ("bytes", "samples", "epochs")
"""Axes whose position is a sum over the rounds of all nodes."""


@dataclass(frozen=True)
class Series:
    """One figure over one axis. low, high: the extremes over nodes, or mean minus and plus standard deviation over
    seeds."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    def above(self, least: float) -> Series:
        """Returns the points whose x is above `least`."""
        return self._at([place for place, x in enumerate(self.x) if x > least])

    def reaching(self, least: float) -> Series:
        """Returns the points whose mean is `least` or more."""
        return self._at([place for place, mean in enumerate(self.mean) if mean >= least])

    def condensed(self, most: int) -> tuple[Series, int]:
        """Returns (a series of at most `most` points, how many consecutive points each of them stands for). Each point
        has the last x of its block, the mean and the extremes."""
        size = -(-len(self.x) // most)
        if size <= 1:
            return self, 1
        blocks = [slice(start, start + size) for start in range(0, len(self.x), size)]
        return Series([self.x[block][-1] for block in blocks], [statistics.fmean(self.mean[block]) for block in blocks],
                      [min(self.low[block]) for block in blocks], [max(self.high[block]) for block in blocks]), size

    def _at(self, kept: Sequence[int]) -> Series:
        return Series(*([values[place] for place in kept] for values in (self.x, self.mean, self.low, self.high)))


class NodeValues(list[float]):
    """The values of the nodes at one moment, at least one."""

    pooled: float | None = None
    """The value for the test samples of all nodes together, if each node has only a part of them."""

    @property
    def mean(self) -> float:
        """The mean over the nodes, as the run reports it."""
        return statistics.fmean(self) if self.pooled is None else self.pooled


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run by uid, in order. They must not change, because what is computed from them is kept."""

    path: Path
    nodes: dict[int, list[dict[str, Any]]]
    measured: TaskMetrics = DEFAULT_METRICS
    """What its task measures."""

    @functools.cached_property
    def num_nodes(self) -> int:
        """Returns the number of nodes of the run; more than those with records here if others ran on other machines."""
        try:
            recorded = json.loads((self.path / "summary.json").read_text(encoding="utf-8")).get("num_nodes")
        except (OSError, ValueError, AttributeError):
            recorded = None
        return max(len(self.nodes), recorded) if isinstance(recorded, int) else len(self.nodes)

    @functools.cached_property
    def _by_kind(self) -> dict[str, dict[int, list[dict[str, Any]]]]:
        """kind -> uid -> the records of this kind, in order."""
        found: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for uid, records in self.nodes.items():
            for record in records:
                found.setdefault(record.get("kind", ""), {}).setdefault(uid, []).append(record)
        return found

    @functools.cached_property
    def _series(self) -> dict[tuple[str, str, bool], Series]:
        """What `series` has returned: a report draws a curve, and also finds the common part of the axes of all."""
        return {}

    @functools.cached_property
    def _totals(self) -> dict[str, dict[int, float]]:
        """What `_cumulative` has returned, by axis."""
        return {}

    def by_node(self, metric: str, merged: bool = False) -> dict[int, dict[int, tuple[float, float]]]:
        """Returns rounds finished -> uid -> (value, time), in the order of the rounds and in the unit of the curve's
        label."""
        curve = self.measured.curves.get(metric)
        return {} if curve is None else self._by_node(curve, curve.merged if merged else curve.key)

    def _by_node(self, curve: Curve, key: str) -> dict[int, dict[int, tuple[float, float]]]:
        """Returns what `by_node` does, for one key of the curve's records."""
        by_rounds, offset = dict[int, dict[int, tuple[float, float]]](), int(curve.kind == "round")
        for uid, records in self._by_kind.get(curve.kind, {}).items():
            for record in records:
                if isinstance(value := record.get(key), int | float):
                    by_uid = by_rounds.setdefault(record["round"] + offset, {})
                    by_uid[uid] = (curve.scale * value, record.get("time", 0.0))  # the last record of a round wins
        return {rounds: by_rounds[rounds] for rounds in sorted(by_rounds)}

    @functools.cached_property
    def _out_of_step(self) -> bool:
        """Whether nodes did not wait for each other and got into different rounds."""
        return are_out_of_step(self.nodes.values())

    def by_round(self, metric: str, axis: str, merged: bool = False) -> dict[int, tuple[float, NodeValues]]:
        """Returns rounds finished -> (position on the axis, values of the nodes), in the unit of the curve's label. If
        nodes did not wait for each other, these are the rounds of the furthest node and the values of all nodes at that
        time."""
        found = {r: (x, NodeValues(values)) for r, (x, values) in self._by_round(metric, axis, merged).items()}
        curve = self.measured.curves.get(metric)
        if curve is not None and curve.pooled and not merged:
            for r, values in self._by_node(curve, curve.pooled).items():
                if r in found and (not self._out_of_step or r == max(found)):  # of these, only the last one is common
                    found[r][1].pooled = statistics.fmean(value for value, _ in values.values())
        return found

    def _by_round(self, metric: str, axis: str, merged: bool) -> dict[int, tuple[float, list[float]]]:
        node_values = self.by_node(metric, merged)
        if self._out_of_step and node_values:
            return self._by_furthest(node_values, axis)
        cumulative = self._cumulative(axis) if axis in SUMMED else {}
        if axis == VIRTUAL:
            virtual = self.virtual_seconds()
            return {r: (virtual[r], [value for value, _ in values.values()]) for r, values in node_values.items()
                    if r in virtual}  # fmt: skip

        def position(rounds: int) -> float:
            if axis == "seconds":
                return self._running_seconds(max(time for _, time in node_values[rounds].values()))
            return float(rounds) if axis == "rounds" else cumulative.get(rounds, 0.0)

        return {r: (position(r), [value for value, _ in node_values[r].values()]) for r in node_values}

    def _by_furthest(self, node_values: ValuesByRound, axis: str) -> dict[int, tuple[float, list[float]]]:
        snapshots = by_furthest(node_values, self.nodes)
        positions: dict[int, float] = {r: float(r) for r in snapshots}
        if axis == "seconds":
            positions = {r: self._running_seconds(each.time) for r, each in snapshots.items()}
        elif axis in SUMMED:
            increments = sorted((time, increment) for _, time, increment in self._increments(axis))
            times = [time for time, _ in increments]
            totals = [0.0, *itertools.accumulate(increment for _, increment in increments)]
            positions = {r: totals[bisect.bisect_right(times, each.time)] for r, each in snapshots.items()}
        elif axis == VIRTUAL:
            positions = virtual_by_round(self.nodes.values()) or self.virtual_seconds()
        return {r: (positions[r], each.values) for r, each in snapshots.items() if r in positions}

    def virtual_seconds(self) -> dict[int, float]:
        """Returns rounds finished -> virtual seconds at which all nodes had finished them: what `decentnode timeline`
        computed last, else what a simulation recorded; empty for a run without virtual time."""
        try:
            finished = json.loads((self.path / VIRTUAL_FILE).read_text(encoding="utf-8"))["finished"]
            return {r: float(seconds) for r, seconds in enumerate([0.0, *finished])}
        except (OSError, ValueError, KeyError, TypeError):
            pass
        by_rounds: dict[int, float] = {}
        for records in self.nodes.values():
            for record in records:
                if isinstance(seconds := record.get(VIRTUAL), int | float):
                    rounds = record["round"] + int(record.get("kind") == "round")
                    by_rounds[rounds] = max(by_rounds.get(rounds, 0.0), seconds)
        return by_rounds

    def series(self, metric: str, axis: str, merged: bool = False) -> Series:
        """Returns the values joined over nodes by round. Seconds count from the first record of any node, without the
        time between a run and its resumption; bytes are the payloads that all nodes had sent."""
        key = metric, axis, merged
        if key not in self._series:
            points = self.by_round(metric, axis, merged).values()
            self._series[key] = Series(
                [x for x, _ in points], [v.mean for _, v in points],
                [min(v) for _, v in points], [max(v) for _, v in points],
            )  # fmt: skip
        return self._series[key]

    def _running_seconds(self, time: float) -> float:
        """Returns for how many seconds the run had been running at the given time of its records."""
        paused = sum(min(until, time) - since for since, until in self._pauses if since < time)
        return max(0.0, time - self._began - paused)

    @functools.cached_property
    def _began(self) -> float:
        """The time of the first evaluation, or of the start of the first round."""
        first = [r[0] for r in self.nodes.values() if r]
        return min((r["time"] - r.get("seconds", 0.0) for r in first if "time" in r), default=0.0)

    @functools.cached_property
    def _pauses(self) -> list[tuple[float, float]]:
        """(since, until) of the times in which no node ran: each resumed from a checkpoint after them, had not started,
        or had ended. A node that comes back while others run makes no pause."""
        shared = [(-math.inf, math.inf)]
        for records in self.nodes.values():
            timed = [each for each in records if "time" in each]
            if timed:
                own = [(last["time"], each["time"]) for last, each in itertools.pairwise(timed)
                       if each.get("kind") == "resumed"]  # fmt: skip
                own += [(-math.inf, timed[0]["time"]), (timed[-1]["time"], math.inf)]
                shared = [(max(a, c), min(b, d)) for a, b in shared for c, d in own if max(a, c) < min(b, d)]
        return [each for each in shared if math.isfinite(each[0]) and math.isfinite(each[1])]

    def _cumulative(self, axis: str) -> dict[int, float]:
        """Returns rounds finished -> the bytes of payloads that all nodes had sent by then, or the samples or epochs
        that they had trained on, including those of nodes that have left."""
        if axis in self._totals:
            return self._totals[axis]
        increments: dict[int, float] = {}
        for rounds, _, increment in self._increments(axis):
            increments[rounds] = increments.get(rounds, 0.0) + increment
        total, totals = 0.0, {}
        for rounds in sorted(increments):
            total += increments[rounds]
            totals[rounds] = total
        self._totals[axis] = totals
        return totals

    def _increments(self, axis: str) -> Iterator[tuple[int, float, float]]:
        """Yields (rounds finished, time, increment of the node's round) of all nodes, in the unit of an axis of SUMMED.
        Raises UsageError for epochs if the run does not say how many samples it has."""
        if axis == "bytes":
            yield from self._sent()
            return
        epoch = self._train_samples if axis == "epochs" else 1
        for records in self.nodes.values():
            for record in records:
                if record.get("kind") == "round":
                    yield record["round"] + 1, record.get("time", 0.0), record.get("samples", 0) / epoch

    @functools.cached_property
    def _train_samples(self) -> int:
        """The total number of training samples of the nodes here."""
        try:
            figures = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))["nodes"]
            return max(1, sum(figures[str(uid)]["train_samples"] for uid in self.nodes))
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"epochs need a run whose summary.json says how many training samples its nodes have "
                             f"(train_samples), which {self.path} has not; --x samples needs none") from None

    def _sent(self) -> Iterator[tuple[int, float, float]]:
        """Yields (rounds finished, time, bytes of payloads that the node sent since its previous round) of all
        nodes."""
        for records in self.nodes.values():
            payloads = SentPayloads()
            for record in records:
                if record.get("kind") == "round":
                    yield record["round"] + 1, record.get("time", 0.0), payloads.take(record)


@dataclass(frozen=True)
class Line:
    """One line of a plot: a run, or repeats of one experiment."""

    label: str
    runs: tuple[RecordedRun, ...]
    panel: str = ""
    """The panel that shows it, in a figure with a panel for each value of a key."""

    def series(self, metric: str, axis: str, merged: bool = False) -> Series:
        """Returns the series of a single run; for several runs, means and standard deviations of the runs' means over
        the rounds that all of them have, at the mean positions."""
        if len(self.runs) == 1:
            return self.runs[0].series(metric, axis, merged)
        by_run = [run.by_round(metric, axis, merged) for run in self.runs]
        rounds = sorted(set(by_run[0]).intersection(*by_run[1:]))
        values = [[each[r][1].mean for each in by_run] for r in rounds]
        means, deviations = [statistics.fmean(v) for v in values], [statistics.stdev(v) for v in values]
        return Series(
            [statistics.fmean(each[r][0] for each in by_run) for r in rounds], means,
            [m - d for m, d in zip(means, deviations, strict=True)],
            [m + d for m, d in zip(means, deviations, strict=True)],
        )  # fmt: skip


def load(path: Path) -> RecordedRun:
    """Reads a run; the times of all records are by the clock of its first machine. Raises UsageError if the directory
    holds no metrics."""
    files = sorted(path.glob("nodes/*/metrics.jsonl"))
    records = {int(file.parent.name): list(read(file)) for file in files if file.parent.name.isdigit()}
    if not any(records.values()):
        raise UsageError(f"{path} holds no metrics: nodes/*/metrics.jsonl must have records")
    for uid, ahead in clock_errors(path, records).items():
        for record in records.get(uid, ()):
            if "time" in record:
                record["time"] -= ahead
    return RecordedRun(path, records, metrics_of_run(path))


def curves_of(drawn: Sequence[Line]) -> dict[str, Curve]:
    """Returns every curve that one of the lines can have, by its name."""
    curves: dict[str, Curve] = {}
    for line in drawn:
        for run in line.runs:
            curves = {**run.measured.curves, **curves}
    return curves


def axes_of(drawn: Sequence[Line]) -> list[str]:
    """Returns the axes of a picture of these lines: virtual time is included if all of them have it."""
    virtual = all(run.virtual_seconds() for line in drawn for run in line.runs)
    return [*AXES, *([VIRTUAL] if virtual else [])]


def chosen_curves(drawn: Sequence[Line], metrics: Sequence[str]) -> dict[str, Curve]:
    """Returns the curves of these names, in their order. Raises UsageError for a name that none of the lines can
    have."""
    known = curves_of(drawn)
    for metric in metrics:
        if metric not in known:
            raise UsageError(f"metric must be one of {', '.join(known)}, which such runs can have, got {metric!r}"
                             + did_you_mean(metric, known))  # fmt: skip
    return {metric: known[metric] for metric in metrics}


def overview(drawn: Sequence[Line]) -> list[str]:
    """Returns the curves of an overview of these lines: the main metric of each task, loss, consensus distance."""
    mains = (curve_name(run.measured.main) for line in drawn for run in line.runs)
    return list(dict.fromkeys([*mains, "loss", "consensus_distance"]))


def lines(
    paths: Sequence[Path], names: Sequence[str] = (), seeds_once: bool = False, panel: str | None = None
) -> tuple[list[Line], list[str]]:
    """Returns (a line per experiment, reasons for the runs that are left out). Runs that did not finish get lines of
    their own, whose labels say so; so do earlier runs with the same seed, unless `seeds_once` leaves them out.

    names: labels of the first lines, instead of the generated ones. panel: a key; lines that differ only in its value
    have the same label. Raises UsageError for more names than lines, and for a panel key in which runs do not differ.
    """
    runs = [_read_run(path) for path in dict.fromkeys(paths)]
    groups, notes = repeats.group_repeats([each for each in runs if each.finished])
    if not seeds_once:
        pooled = {each.path for group in groups for each in group}
        groups += [[each] for each in runs if each.finished and each.path not in pooled]
        notes = []
    groups += [[each] for each in runs if not each.finished]
    place = {each.path: index for index, each in enumerate(runs)}
    groups.sort(key=lambda group: min(place[each.path] for each in group))
    labeled = [("", label) for label in _labels(groups)] if panel is None else _panel_labels(groups, panel)
    generated = dict.fromkeys(label for _, label in labeled)
    if len(names) > len(generated):
        raise UsageError(f"--label must be given {len(generated)} times at most, got {len(names)}")
    renamed = dict(zip(generated, [*names, *[*generated][len(names) :]], strict=True))
    all_lines = [Line(renamed[label], tuple(load(each.path) for each in group), panel_title)
                 for (panel_title, label), group in zip(labeled, groups, strict=True)]  # fmt: skip
    return all_lines, notes


def _panel_labels(groups: Sequence[Sequence[RunResult]], panel: str) -> list[tuple[str, str]]:
    """Returns for each group (the title of its panel, its label within the panel). Raises UsageError."""
    configs = [{"name": group[0].name, **group[0].config} for group in groups]
    differing = repeats.differing_keys(configs)
    panel_keys = [key for key in differing if key == panel or key.startswith(f"{panel}.")]
    if not panel_keys:
        raise UsageError(f"panel must be a key in which the runs differ ({', '.join(differing) or 'there is none'}), "
                         f"got {panel!r}" + did_you_mean(panel, differing))  # fmt: skip
    derived = {key for group in groups for key in group[0].derived_keys}
    others = [key for key in differing if key not in panel_keys]

    def text(config: Mapping[str, str], keys: Sequence[str]) -> str:
        return " ".join(f"{key.removesuffix('.name')}={config[key]}" for key in keys if key in config)

    titles = [text(each, panel_keys) for each in configs]
    for keys in ([key for key in others if key not in derived], others):
        ends = ["" if group[0].finished else f" ({group[0].ended})" for group in groups]
        labels = [(title, (text(each, keys) or each["name"]) + end)
                  for title, each, end in zip(titles, configs, ends, strict=True)]  # fmt: skip
        if len({*labels}) == len(labels):
            return labels
    return [(title, f"{label} {group[0].path.name}") for (title, label), group in zip(labels, groups, strict=True)]


def _read_run(path: Path) -> RunResult:
    """Reads a run; a folder without a config counts as an experiment of its own."""
    try:
        return repeats.read(path)
    except UsageError:
        return RunResult(path, path.parent.name, None, {"run": str(path)}, "finished", {})


def _labels(groups: Sequence[Sequence[RunResult]]) -> list[str]:
    """Returns distinct labels: equal ones get keys, how the runs ended, seeds, or folders if nothing else differs. A
    name that all runs share is left out if keys distinguish them."""
    stripped = [[replace(each, config={k: v for k, v in each.config.items() if k != "run"}) for each in group]
                for group in groups]  # fmt: skip
    labels = repeats.labels_of(stripped)
    share_name = len(labels) > 1 and len({each.name for each in labels}) == 1 and all(each.settings for each in labels)
    texts = [" ".join([*([] if share_name else [each.name]),
                       *(f"{key.removesuffix('.name')}={value}" for key, value in each.settings.items())])
             for each in labels]  # fmt: skip
    for index, group in enumerate(groups):
        if len(group) > 1:
            texts[index] += f" ({len(group)} seeds)"
        elif not group[0].finished:
            texts[index] += f" ({group[0].ended})"
    for suffix in (lambda run: f" seed {run.seed}" if run.seed is not None else "", lambda run: f" {run.path.name}"):
        often = Counter(texts)
        texts = [label + suffix(group[0]) if often[label] > 1 else label
                 for label, group in zip(texts, groups, strict=True)]  # fmt: skip
    return texts
