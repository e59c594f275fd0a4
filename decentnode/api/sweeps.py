"""Sweeps from Python: the points of an experiment, and what they make of it, as tables and a figure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from decentnode.api.experiment import Experiment
from decentnode.api.progress import DRAIN_SECONDS
from decentnode.api.results import Run, pandas
from decentnode.api.stopped import RunInterrupted
from decentnode.cli.output import Output
from decentnode.errors import UsageError
from decentnode.launch.children import forkserver

if TYPE_CHECKING:  # what imports torch is imported where it is needed, as in api/experiment.py
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from decentnode.api.experiment import Config
    from decentnode.sweeps.conduct import State, Watcher
    from decentnode.sweeps.results import Results, Row


class Sweep:
    """What a sweep came to, as far as it came; `path` is its folder."""

    def __init__(self, state: State) -> None:
        """state: that of a sweep that has ended or was stopped."""
        from decentnode.sweeps.results import results_of

        self.path: Path = state.sweep.folder
        self._results = results_of(state)

    @property
    def metric(self) -> str:
        """The figure of summary.json that combinations are compared by."""
        return self._results.metric.name

    def table(self) -> DataFrame:
        """A row per combination, the best first: mean and deviation (`..._std`) over its seeds of every figure, and the
        paired t-test against the best, with `within` that of its group (`minus_best` with its 95 % interval, `p`).
        Raises EnvironmentFault without pandas."""
        from decentnode.sweeps.results import frame_rows

        return pandas().DataFrame(_typed(frame_rows(self._results), self._results))

    def points(self) -> DataFrame:
        """A row per combination and seed: how it ended, its figures, the folder of its run. Raises as `table`."""
        from decentnode.sweeps.results import point_rows

        return pandas().DataFrame(_typed(point_rows(self._results), self._results))

    def evaluations(self) -> DataFrame:
        """A row per combination, seed and evaluation: the figures of summary.json after that round (`round`), seconds
        since the run began, bytes of payloads that all nodes had sent by then, the mean training loss of the round
        before. Raises as `table`."""
        from decentnode.sweeps.evaluations import evaluation_rows

        return pandas().DataFrame(_typed(evaluation_rows(self._results), self._results))

    @property
    def best(self) -> dict[str, Any]:
        """The values of the best combination by key. Raises UsageError where no point has finished."""
        return {key: _value(text) for key, text in self._best().settings}

    def best_runs(self) -> list[Run]:
        """The runs of the best combination, in the order of their seeds. Raises as `best`."""
        return [Run(each.run) for each in self._best().ended if each.run is not None and each.value is not None]

    def _best(self) -> Row:
        if self._results.best is None:
            raise UsageError(f"no point of the sweep {self._results.name} has finished")
        return self._results.best

    def plot(self) -> Figure:
        """The figure that the command writes. Raises UsageError where no point has finished."""
        from decentnode.sweeps.picture import draw

        return draw(self._results)

    def latex(self) -> str:
        """The table for LaTeX (package booktabs)."""
        from decentnode.sweeps.results import latex_table

        return latex_table(self._results)

    def __str__(self) -> str:
        from decentnode.sweeps.results import text_table

        return text_table(self._results)

    def __repr__(self) -> str:
        best = self._results.best
        told = "no point has finished" if best is None else f"best {best.label}: {self.metric} {best.mean:.4g}"
        return f"<Sweep {self._results.name}: {told}; {os.path.relpath(self.path)}>"


def sweep(
    config: Config | Experiment = None, grid: Mapping[Any, Any] | Iterable[str] = (), *, seeds: int | None = None,
    random: int | None = None, optuna: int | None = None, halving: int | None = None, least_rounds: int = 1,
    metric: str | None = None, jobs: int | None = None, by: Literal["simulate", "processes"] = "simulate",
    again: bool = False, every_model: bool = False, best_by: str | Iterable[str] = (),
    within: str | Iterable[str] = (), target: str | None = None, rounds: int | None = None, name: str | None = None,
    run_dir: str | os.PathLike[str] | None = None, progress: bool | Watcher = True, **sections: Any,
) -> Sweep:
    """Run an experiment with many values of some keys, several points at a time, and return what they make of it, as
    `decentnode sweep` does: what is done is kept in the sweep's folder and never repeated. Blocking.

    config, sections: as in `Experiment.from_config`; a sweep of objects is not possible. grid: key -> its values, or
    text such as "log(1e-4, 1)" to draw from; a tuple of keys that change together -> tuples of values. seeds: run every
    combination with the seeds 1..N. random, optuna: try so many drawn or proposed combinations instead of all. halving:
    factor of successive halving. metric: a figure of summary.json. jobs: points at a time; one per core when not given.
    by: all nodes of a point in one process, or a process per node. again: run points that are done once more.
    every_model: keep the models of all nodes. best_by: keys for each of whose values tables have the best combination
    alone. within: keys for each of whose values combinations are compared with the best one of the same. target:
    "accuracy=0.9" adds what it took until the mean over the nodes was there. rounds, name, run_dir: as in
    `Experiment.run`. progress: whether to show it; or a Watcher, which is told what happens.

    Ctrl-C lets the points under way finish their round, then raises RunInterrupted whose `sweep` has what is done.
    Points that fail are in `points`; raises UsageError where all points have problems.
    """
    from decentnode.cli.sweeping import ConsoleWatcher
    from decentnode.sweeps import files
    from decentnode.sweeps.conduct import Watcher, conduct
    from decentnode.sweeps.plan import Plan, plan
    from decentnode.sweeps.space import axes

    if random is not None and optuna is not None:
        raise UsageError("random and optuna cannot be combined, since both choose the combinations to try: give one "
                         "of them")
    experiment = config if isinstance(config, Experiment) else Experiment.from_config(config)
    forkserver.start()
    found = plan(Plan(
        experiment._swept(sections, rounds=rounds, name=name, run_dir=run_dir), axes(grid), seeds,
        "random" if random else "optuna" if optuna else "grid", random or optuna, halving, least_rounds, metric, jobs,
        by, again, every_model, (best_by,) if isinstance(best_by, str) else tuple(best_by),
        (within,) if isinstance(within, str) else tuple(within), target,
    ))  # fmt: skip
    if isinstance(progress, Watcher):
        state = conduct(found, progress)
    elif not progress:
        state = conduct(found, Watcher())
    else:
        output = Output(sys.stdout, sys.stderr)
        watcher = ConsoleWatcher(output)
        try:
            state = conduct(found, watcher)
        finally:
            watcher.end()
            output.close(DRAIN_SECONDS)
    made = Sweep(state)
    files.write(made._results, found.folder)
    if state.exit_code > 128:
        error = RunInterrupted(f"stopped after {len(state.ended)} of {state.total} points; finished points are "
                               "kept", None,
                               state.exit_code)  # fmt: skip
        error.sweep = made  # type: ignore[attr-defined]
        raise error
    return made


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # such as 1e-4, which YAML 1.1 takes for text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _typed(rows: Iterable[Mapping[str, Any]], results: Results) -> list[dict[str, Any]]:
    """Rows whose values of keys are numbers where they are: all else of them is already."""
    keys = {key for each in results.rows for key, _ in each.settings}
    return [{name: _value(value) if name in keys and isinstance(value, str) else value for name, value in row.items()}
            for row in rows]  # fmt: skip
