"""Samplers choose which points a sweep runs, and in which order: all of a list, successive halving, or Optuna.

A sampler is asked for points and told the value of each; lower values are better. It never waits: if the next point
depends on results that are still missing, it returns None.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.sweeps.point import Point
from decentnode.sweeps.space import Axis, Settings
from decentnode.system import write_atomic

Seeds = Sequence[int | None]


class Sampler(Protocol):
    """Chooses points."""

    def ask(self) -> Point | None:
        """Returns the next point; None if the next one depends on points that still run, and after the last one."""

    def tell(self, point: Point, value: float | None) -> None:
        """Records the value of a point that was asked for: lower is better; None if it did not finish."""

    def known(self) -> list[Point]:
        """Returns the points that will be asked for whatever the results of the others."""

    def remaining(self) -> list[int | None]:
        """Returns the rounds of each point still to be asked for, as far as their number is known; None stands for the
        rounds of the experiment."""

    def previous(self, point: Point) -> Point | None:
        """Returns the point that this one resumes; None if it starts from the beginning."""


class Listed:
    """All points of a list, each with all seeds."""

    def __init__(self, settings: Sequence[Settings], seeds: Seeds) -> None:
        self._pending = deque(Point(each, seed) for each in settings for seed in seeds)

    def ask(self) -> Point | None:
        return self._pending.popleft() if self._pending else None

    def tell(self, point: Point, value: float | None) -> None:
        """Does nothing: the points do not depend on results."""

    def known(self) -> list[Point]:
        return [*self._pending]

    def remaining(self) -> list[int | None]:
        return [None] * len(self._pending)

    def previous(self, point: Point) -> Point | None:  # noqa: ARG002
        return None


def budgets(rounds: int, candidates: int, eta: int, least: int) -> list[int]:
    """Returns the cumulative rounds after each rung of successive halving: `rounds` for the last one, 1/eta of the next
    rung's for each other, never below `least`, and no more rungs than leave a candidate."""
    rungs = [rounds]
    while math.ceil(rungs[0] / eta) >= least and eta ** len(rungs) <= candidates and rungs[0] > 1:
        rungs.insert(0, math.ceil(rungs[0] / eta))
    return rungs


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean over seeds; None if one of them has no value."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


class Halving:
    """Successive halving (Jamieson and Talwalkar, 2016, algorithm 1): all candidates run a part of the rounds, the best
    of them continue to `eta` times as many rounds, until the last ones have run all rounds.

    A candidate is one combination with all its seeds, ranked by the mean of their values. A candidate that did not
    finish with some seed is eliminated.
    """

    def __init__(self, settings: Sequence[Settings], seeds: Seeds, budgets: Sequence[int], eta: int) -> None:
        self._seeds, self._budgets, self._eta = seeds, budgets, eta
        self._rung = 0
        self._candidates = [*settings]
        self._values: dict[Settings, list[float | None]] = {}
        self._pending: deque[Point] = deque()
        self._queue_rung()

    def _queue_rung(self) -> None:
        self._values = {each: [] for each in self._candidates}
        self._pending.extend(Point(each, seed, self._budgets[self._rung])
                             for each in self._candidates for seed in self._seeds)  # fmt: skip

    def ask(self) -> Point | None:
        return self._pending.popleft() if self._pending else None

    def tell(self, point: Point, value: float | None) -> None:
        self._values[point.settings].append(value)
        if any(len(values) < len(self._seeds) for values in self._values.values()):
            return
        means = {each: mean(values) for each, values in self._values.items()}
        complete = {each: value for each, value in means.items() if value is not None}
        self._rung += 1
        if self._rung < len(self._budgets) and complete:
            kept = max(1, len(self._candidates) // self._eta)
            self._candidates = sorted(complete, key=complete.__getitem__)[:kept]  # stable: of equal ones the first
            self._queue_rung()

    def known(self) -> list[Point]:
        return [*self._pending]

    def remaining(self) -> list[int | None]:
        found: list[int | None] = [point.rounds for point in self._pending]
        count = len(self._candidates)
        for rounds in self._budgets[self._rung + 1 :]:
            count = max(1, count // self._eta)
            found += [rounds] * (count * len(self._seeds))
        return found

    def previous(self, point: Point) -> Point | None:
        assert point.rounds is not None
        rung = [*self._budgets].index(point.rounds)
        return Point(point.settings, point.seed, self._budgets[rung - 1]) if rung else None


class Optuna:
    """Combinations that an Optuna sampler proposes by ask and tell: `count` of them, each with all seeds.

    Results are appended to a file, so that a later command with the same experiment, axes, seeds and metric continues
    from them. With several jobs, new proposals are asked for while points still run, so that the proposals are
    reproducible only with one job.
    """

    def __init__(self, axes: Sequence[Axis], seeds: Seeds, count: int, seed: int, file: Path) -> None:
        """file: the file of results. Raises EnvironmentFault if Optuna is not installed."""
        try:
            import optuna
        except ImportError as error:
            raise EnvironmentFault("--sampler optuna needs Optuna: pip install 'decentnode[optuna]' (or optuna)"
                                   ) from error  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._axes, self._seeds, self._count, self._file = optuna, axes, seeds, count, file
        self._distributions = {axis.key: self._distribution_of(axis) for axis in axes}
        records = self._read()[:count]
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed + len(records)))
        for line in records:
            self._study.add_trial(self._trial_of(line))
        self._asked = len(records)
        self._pending = deque(Point(_settings(line), seed) for line in records for seed in seeds)
        """The known combinations are asked for first: their runs exist, and belong to the results."""
        self._recorded = {_settings(line) for line in records}
        self._trials: dict[Settings, list[Any]] = {}
        self._values: dict[Settings, list[float | None]] = {}

    def _distribution_of(self, axis: Axis) -> Any:
        distributions = self._optuna.distributions
        if axis.distribution is None:
            return distributions.CategoricalDistribution(axis.values)
        log = axis.distribution.kind.startswith("log")
        if axis.distribution.kind.endswith("int"):
            return distributions.IntDistribution(int(axis.distribution.low), int(axis.distribution.high), log=log)
        return distributions.FloatDistribution(axis.distribution.low, axis.distribution.high, log=log)

    def _read(self) -> list[Mapping[str, Any]]:
        """Returns the results that earlier commands with the same space and seeds recorded."""
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:  # a partial last line of a killed command must not be continued
                write_atomic(self._file, "".join(f"{json.dumps(each)}\n" for each in records))
                break
        return records

    def _trial_of(self, line: Mapping[str, Any]) -> Any:
        state = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(
            params=line["params"], distributions=self._distributions, value=line["value"],
            state=state.FAIL if line["value"] is None else state.COMPLETE,
        )  # fmt: skip

    def ask(self) -> Point | None:
        if not self._pending and self._asked < self._count:
            trial = self._study.ask(self._distributions)
            self._asked += 1
            settings = tuple(pair for axis in self._axes for pair in axis.settings(_text(trial.params[axis.key])))
            self._trials.setdefault(settings, []).append(trial)
            if settings not in self._values:
                self._values[settings] = []
                self._pending.extend(Point(settings, seed) for seed in self._seeds)
            elif len(self._values[settings]) == len(self._seeds):  # proposed a second time
                self._finish(settings)
                return self.ask()
        return self._pending.popleft() if self._pending else None

    def tell(self, point: Point, value: float | None) -> None:
        if point.settings in self._recorded and point.settings not in self._trials:
            return
        values = self._values[point.settings]
        values.append(value)
        if len(values) == len(self._seeds):
            self._finish(point.settings)

    def _finish(self, settings: Settings) -> None:
        value = mean(self._values[settings])
        for trial in self._trials.pop(settings):
            state = self._optuna.trial.TrialState.FAIL if value is None else None
            self._study.tell(trial, value, state=state)
            line = {"params": trial.params, "settings": dict(settings), "value": value}
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def known(self) -> list[Point]:
        return [*self._pending]

    def remaining(self) -> list[int | None]:
        return [None] * (len(self._pending) + (self._count - self._asked) * len(self._seeds))

    def previous(self, point: Point) -> Point | None:  # noqa: ARG002
        return None


def _settings(line: Mapping[str, Any]) -> Settings:
    return tuple(line["settings"].items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)


def direction(metric: str, better: Mapping[str, str]) -> int:
    """Returns 1 if lower values of a figure are better, -1 if higher ones are. better: "higher" or "lower" by the
    figure's name. Raises UsageError for a figure that runs do not have."""
    if metric not in better:
        from decentnode.similar_words import did_you_mean

        raise UsageError(f"--metric must be one of {', '.join(better)}, which these runs have, got {metric!r}"
                         + did_you_mean(metric, better))  # fmt: skip
    return 1 if better[metric] == "lower" else -1
