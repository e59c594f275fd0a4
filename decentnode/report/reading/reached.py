"""Figures derived from a run's curve: the best round, and the cost of reaching a target value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from decentnode.errors import UsageError
from decentnode.metrics.figures import AXES, VIRTUAL, Curve, Figure, TaskMetrics, curve_name
from decentnode.report.reading.repeats import RunResult
from decentnode.report.reading.runs import RecordedRun, load
from decentnode.similar_words import did_you_mean

T = TypeVar("T")
ExtraColumn = tuple[Figure, Callable[[RunResult], float | None]]
"""An additional column of a table: its heading, and a function that returns the value of a run, None if it has none."""

COSTS = {"rounds": ("rounds", 1.0, 0), "seconds": ("s", 1.0, 2), "bytes": ("MB/node", 1e-6, 2),
         VIRTUAL: ("virtual s", 1.0, 2)}  # fmt: skip
"""By axis: unit in headings, scale, digits."""


@dataclass(frozen=True)
class Target:
    """A value of a curve that runs should reach."""

    metric: str
    value: float
    """In the unit of the plots' labels, such as %."""
    better: Literal["higher", "lower"]
    text: str
    """Its form in headings: "90 %"."""

    def is_met(self, value: float) -> bool:
        return value >= self.value if self.better == "higher" else value <= self.value


def better_of(metric: str, measured: TaskMetrics) -> Literal["higher", "lower"]:
    """Returns whether higher or lower values of a curve are better; for losses and distances lower ones are."""
    metrics_of_curve = next((each for each in measured.metrics if curve_name(each) == metric), None)
    return metrics_of_curve.better if metrics_of_curve is not None else "lower"


def target_of(text: str, measured: TaskMetrics) -> Target:
    """Parses "accuracy=0.9" or "0.9" (of the main metric). Values are those of the files: fractions, not percent.
    Raises UsageError."""
    name, _, value = text.rpartition("=")
    name = name or curve_name(measured.main)
    curve = measured.curves.get(name)
    if curve is None:
        raise UsageError(f"--target must name one of {', '.join(measured.curves)}, got {name!r}"
                         + did_you_mean(name, measured.curves))  # fmt: skip
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"--target must be METRIC=NUMBER, such as {curve_name(measured.main)}=0.9, got {text!r}")
    if curve.scale == 100.0 and not 0 <= number <= 1:
        raise UsageError(f"--target: {name} is a fraction from 0 to 1, got {value}")
    unit = _unit(curve)
    return Target(name, curve.scale * number, better_of(name, measured), f"{curve.scale * number:g}{unit}")


def _unit(curve: Curve) -> str:
    return " %" if curve.label.endswith("(%)") else ""


def first_reached(run: RecordedRun, target: Target) -> int | None:
    """Returns the number of rounds after which the mean over the nodes first met the target; None if it never did. Only
    evaluations are considered: values between two of them are unknown."""
    for rounds, (_, values) in run.by_round(target.metric, "rounds").items():
        if target.is_met(values.mean):
            return rounds
    return None


def cost(run: RecordedRun, target: Target, axis: str) -> float | None:
    """Returns the cost of meeting a target: rounds, seconds, or bytes sent per node on average. None if it was never
    met."""
    rounds = first_reached(run, target)
    if rounds is None:
        return None
    point = run.by_round(target.metric, axis).get(rounds)
    if point is None:
        return None
    return point[0] / max(1, len(run.nodes)) if axis == "bytes" else point[0]


def best(run: RecordedRun, metric: str) -> tuple[int, float] | None:
    """Returns (rounds finished, value) of the best mean over the nodes, the earliest one if several are equal; None
    without an evaluation."""
    sign = 1 if better_of(metric, run.measured) == "higher" else -1
    means = [(rounds, values.mean) for rounds, (_, values) in run.by_round(metric, "rounds").items()]
    return max(means, key=lambda each: (sign * each[1], -each[0]), default=None)


class _RunCache(Generic[T]):
    """Caches the result of a function of a run's records, so that each run is read once."""

    def __init__(self, compute: Callable[[RecordedRun], T]) -> None:
        self._of = compute
        self._found: dict[Path, T | None] = {}

    def __call__(self, ran: RunResult) -> T | None:
        """Returns the function's result; None if the run's records were removed."""
        if ran.path not in self._found:
            try:
                self._found[ran.path] = self._of(load(ran.path))
            except UsageError:
                self._found[ran.path] = None
        return self._found[ran.path]


TO_TARGET = "rounds_to_target"
"""The first of `target_columns`: runs without a value in it never reached the target."""


def target_columns(runs: Sequence[RunResult], text: str) -> list[ExtraColumn]:
    """Returns columns for rounds, seconds and bytes to a target, and for virtual seconds if a run has them."""
    target = target_of(text, runs[0].measured)

    def costs(run: RecordedRun) -> dict[str, float | None]:
        return {axis: cost(run, target, axis) for axis in (*AXES, *([VIRTUAL] if run.virtual_seconds() else []))}

    costs_of = _RunCache(costs)
    virtual = any(VIRTUAL in (costs_of(ran) or {}) for ran in runs)
    columns: list[ExtraColumn] = []
    for axis in (*AXES, *([VIRTUAL] if virtual else [])):
        unit, scale, digits = COSTS[axis]
        figure = Figure(f"{axis}_to_target", unit, f"until {target.metric} was {target.text}",
                        "report/reading/reached.py", f"{unit} to {target.text}", scale, digits,
                        absent="not reached")  # fmt: skip
        columns.append((figure, lambda ran, axis=axis: (costs_of(ran) or {}).get(axis)))  # type: ignore[misc]
    return columns


def best_columns(runs: Sequence[RunResult]) -> list[ExtraColumn]:
    """Returns columns for the best mean over the nodes and the round of that evaluation."""
    measured = runs[0].measured
    metric, main = curve_name(measured.main), measured.by_name[f"{measured.main.name}_mean"]
    best_of = _RunCache(lambda run: best(run, metric))

    def of(ran: RunResult, place: int) -> float | None:
        best_mean = best_of(ran)
        if best_mean is None:
            return None
        return best_mean[0] if place == 0 else best_mean[1] / measured.curves[metric].scale

    value = Figure("best", main.unit, "the best mean over the nodes", "report/reading/reached.py", f"best {main.title}",
                   main.scale, main.digits)  # fmt: skip
    rounds = Figure("best_round", "rounds", "after which it was found", "report/reading/reached.py", "best round",
                    1.0, 0)  # fmt: skip
    return [(value, lambda ran: of(ran, 1)), (rounds, lambda ran: of(ran, 0))]
