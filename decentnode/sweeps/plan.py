"""What the user asks of a sweep, checked before its first point starts."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from decentnode.errors import UsageError
from decentnode.experiment import Experiment
from decentnode.launch.children.messages import Request
from decentnode.metrics.figures import BY_NAME, TaskMetrics
from decentnode.report.reading.reached import target_of
from decentnode.similar_words import did_you_mean
from decentnode.sweeps.child import By
from decentnode.sweeps.point import Point, digest_of, label_of, load_base
from decentnode.sweeps.samplers import Halving, Listed, Optuna, Sampler, budgets, direction
from decentnode.sweeps.space import Axis, draws, grid, short_values

Kind = Literal["grid", "random", "optuna"]
HIGHER_IS_BETTER = frozenset({"rounds"})
"""Figures that runs of every task have and of which higher values are better; of all others lower values are."""


@dataclass(frozen=True)
class Plan:
    """What a user asks of a sweep."""

    request: Request
    """The request of the experiment from which all points derive."""
    axes: tuple[Axis, ...] = ()
    seeds: int | None = None
    """Seeds 1 to N for every combination; None: only the experiment's own seed."""
    sampler: Kind = "grid"
    points: int | None = None
    """How many combinations are drawn at random or proposed by Optuna."""
    halving: int | None = None
    """The factor of successive halving; None: every combination runs all rounds."""
    least_rounds: int = 1
    """Minimum rounds of the first rung of halving."""
    metric: str | None = None
    """The figure of summary.json by which combinations are compared; None: the task's main metric, mean over nodes."""
    jobs: int | None = None
    """Points that run at a time; None: as many as the machine has cores for."""
    by: By = "simulate"
    again: bool = False
    """Whether points that are done are run again."""
    every_model: bool = False
    """Whether the models of the single nodes are kept in the points' folders."""
    best_by: tuple[str, ...] = ()
    """Keys: for each combination of their values, tables show only the best row."""
    within: tuple[str, ...] = ()
    """Keys that divide the combinations into groups, each compared with the best of its group; none: all are compared
    with the best of all."""
    target: str | None = None
    """"metric=value": tables show what it took to reach this value."""
    more: tuple[str, ...] = field(default=('node.checkpoint={every: 1000000000, keep: 1}',), repr=False)

    def __post_init__(self) -> None:
        """Raises UsageError if options contradict each other."""
        keys = [key for axis in self.axes for key in axis.keys]
        if self.seeds is not None and "seed" in keys:
            raise UsageError("--seeds and -g seed both set the seeds: give only one of them")
        if any(key.split(".")[0] == "run" or key == "name" for key in keys):
            raise UsageError("-g must not set name or run, which say where results go: use --name and --run-dir, "
                             "which apply to all points")  # fmt: skip
        if self.sampler == "grid" and self.points is not None:
            raise UsageError("--points is only for --sampler random and optuna: a grid runs all its combinations")
        if self.sampler != "grid" and self.points is None:
            raise UsageError(f"--sampler {self.sampler} needs the number of combinations to try: --points N")
        if self.sampler != "grid" and not self.axes:
            raise UsageError(f"--sampler {self.sampler} needs values to choose from: -g KEY=VALUE,...")
        if self.halving is not None and self.sampler == "optuna":
            raise UsageError("--halving works with a grid or random draws, not with --sampler optuna")
        if self.halving is not None and any(key.startswith("node.rounds") for key in keys):
            raise UsageError("--halving sets node.rounds itself, so -g node.rounds must not")
        asked = [*(("--best-by", each) for each in self.best_by), *(("--within", each) for each in self.within)]
        for option, each in asked:
            if not any(each == key or each.startswith(f"{key}.") for key in keys):
                raise UsageError(f"{option} must name keys of -g ({', '.join(keys) or 'there are none'}), got {each!r}"
                                 + did_you_mean(each, keys))  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """A plan together with the values derived from its experiment."""

    plan: Plan
    folder: Path
    name: str
    measured: TaskMetrics
    metric: str
    sign: int
    """1 if lower values of the metric are better, -1 if higher ones are."""
    jobs: int
    rounds: int
    more: tuple[str, ...]
    """Further "key=value" overrides for the points of halving."""
    rungs: tuple[int, ...]
    """The cumulative rounds after each rung of halving; empty without halving."""
    sampler: Sampler

    @functools.cached_property
    def _short(self) -> dict[str, dict[str, str]]:
        """For each key, the short texts of its listed values."""
        listed: dict[str, list[str]] = {}
        for axis in self.plan.axes:
            for key, value in itertools.chain.from_iterable(map(axis.settings, axis.values)):
                listed.setdefault(key, []).append(value)
        return {key: short_values(values) for key, values in listed.items()}

    def label(self, point: Point) -> str:
        """Returns the values of a point in readable form, sections as in tables."""
        return label_of(point.settings, point.seed, self._short)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plan(asked: Plan) -> Sweep:
    """Checks a plan and returns the sweep. Raises UsageError, ConfigError, EnvironmentFault."""
    base = load_base(asked.request)
    measured = base.measured()
    metric = asked.metric or f"{measured.main.name}_mean"
    sign = direction(metric, better_of(measured))
    if asked.target is not None:
        target_of(asked.target, measured)  # raises UsageError if the target is invalid
    seeds: Sequence[int | None] = [None] if asked.seeds is None else range(1, asked.seeds + 1)
    folder = base.run_dir / base.name / "sweep"
    rungs: tuple[int, ...] = ()
    sampler: Sampler
    if asked.sampler == "optuna":
        assert asked.points is not None
        file = folder / f"optuna-{_study_name(asked, base)}.jsonl"
        sampler = Optuna(asked.axes, seeds, asked.points, base.seed, file)
    else:
        settings = grid(asked.axes) if asked.points is None else draws(asked.axes, asked.points, base.seed)
        sampler = Listed(settings, seeds)
        if asked.halving is not None:
            rungs = tuple(budgets(base.node.rounds, len(settings), asked.halving, asked.least_rounds))
            sampler = Halving(settings, seeds, rungs, asked.halving)
    jobs = asked.jobs or (cores() if asked.by == "simulate" else max(1, cores() // base.make_graph().num_nodes))
    more = asked.more if base.node.checkpoint is None else ()
    return Sweep(asked, folder, base.name, measured, metric, sign, jobs, base.node.rounds, more, rungs, sampler)


def better_of(measured: TaskMetrics) -> dict[str, str]:
    """Returns "higher" or "lower", whichever is better, by the name of each figure of a run's summary."""
    better = {figure.name: metric.better for metric in measured.metrics for figure in metric.figures(False)}
    return {**better, **{name: "higher" if name in HIGHER_IS_BETTER else "lower" for name in BY_NAME}}


def _study_name(asked: Plan, base: Experiment) -> str:
    """Returns a name for the Optuna study: a hash of everything that determines its proposals."""
    axes = [[axis.key, axis.values, vars(axis.distribution) if axis.distribution else None] for axis in asked.axes]
    text = json.dumps([digest_of(base, asked.by), axes, asked.seeds, asked.metric])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
