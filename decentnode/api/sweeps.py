"""Runs sweeps from Python and gives their results as tables and a figure."""

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
from decentnode.api.run_errors import RunInterrupted
from decentnode.cli.output import Output
from decentnode.errors import UsageError
from decentnode.launch.children import forkserver

if TYPE_CHECKING:  # modules that import torch are imported only when needed, as in api/experiment.py
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from decentnode.api.experiment import Config
    from decentnode.sweeps.conduct import State, Watcher
    from decentnode.sweeps.results import Results, Row


class Sweep:
    """The results of a sweep that has ended or was stopped; `path` is its folder."""

    def __init__(self, state: State) -> None:
        """state: of a sweep that has ended or was stopped."""
        from decentnode.sweeps.results import results_of

        self.path: Path = state.sweep.folder
        self._results = results_of(state)

    @property
    def metric(self) -> str:
        """The figure of summary.json by which combinations are compared."""
        return self._results.metric.name

    def table(self) -> DataFrame:
        """Returns a row per combination, the best first: mean and standard deviation (`..._std`) of every figure over
        the seeds, and a paired t-test against the best combination, with `within` against the best of its group
        (`minus_best` with its 95 % interval, `p`). A column per key has its values; of sections, the short text of
        printed tables. Raises EnvironmentFault without pandas."""
        from decentnode.sweeps.results import frame_rows

        return pandas().DataFrame(_with_values(frame_rows(self._results), self._results))

    def points(self) -> DataFrame:
        """Returns a row per combination and seed: how it ended, its figures, the folder of its run. Raises as `table`
        does."""
        from decentnode.sweeps.results import point_rows

        return pandas().DataFrame(_with_values(point_rows(self._results), self._results))

    def evaluations(self) -> DataFrame:
        """Returns a row per combination, seed and evaluation: the figures of summary.json after that round (`round`),
        seconds since the run began, bytes of payloads that all nodes had sent by then, and the mean training loss of
        the round before. Raises as `table` does."""
        from decentnode.sweeps.evaluations import evaluation_rows

        return pandas().DataFrame(_with_values(evaluation_rows(self._results), self._results))

    @property
    def best(self) -> dict[str, Any]:
        """The values of the best combination by key. Raises UsageError if no point has finished."""
        return {key: _parsed(text) for key, text in self._best().settings}

    def best_runs(self) -> list[Run]:
        """Returns the runs of the best combination in the order of their seeds. Raises as `best` does."""
        return [Run(each.run) for each in self._best().ended if each.run is not None and each.value is not None]

    def _best(self) -> Row:
        if self._results.best is None:
            raise UsageError(f"no point of the sweep {self._results.name} has finished")
        return self._results.best

    def plot(self) -> Figure:
        """Returns the figure that `decentnode sweep` writes. Raises UsageError if no point has finished."""
        from decentnode.sweeps.picture import draw

        return draw(self._results)

    def latex(self) -> str:
        """Returns the table for LaTeX (package booktabs)."""
        from decentnode.sweeps.results import latex_table

        return latex_table(self._results)

    def __str__(self) -> str:
        from decentnode.sweeps.results import text_table

        return text_table(self._results)

    def __repr__(self) -> str:
        best = self._results.best
        result = "no point has finished" if best is None else f"best {best.label}: {self.metric} {best.mean:.4g}"
        return f"<Sweep {self._results.name}: {result}; {os.path.relpath(self.path)}>"


def sweep(
    config: Config | Experiment = None, grid: Mapping[Any, Any] | Iterable[str] = (), *, seeds: int | None = None,
    random: int | None = None, optuna: int | None = None, halving: int | None = None, least_rounds: int = 1,
    metric: str | None = None, jobs: int | None = None, by: Literal["simulate", "processes"] = "simulate",
    again: bool = False, every_model: bool = False, best_by: str | Iterable[str] = (),
    within: str | Iterable[str] = (), target: str | None = None, rounds: int | None = None, name: str | None = None,
    run_dir: str | os.PathLike[str] | None = None, progress: bool | Watcher = True, **sections: Any,
) -> Sweep:
    """Runs an experiment with many values of some keys, several points at a time, and returns the results, as
    `decentnode sweep` does. Finished points are kept in the sweep's folder and not repeated. Blocking.

    config, sections: as in `Experiment.from_config`; a sweep of objects is not possible. grid: key -> its values, or
    text such as "log(1e-4, 1)" from which values are drawn; a tuple of keys that change together -> tuples of values.
    seeds: run every combination with the seeds 1..N. random, optuna: try this many drawn or proposed combinations
    instead of all. halving: factor of successive halving. least_rounds: least rounds of its first rung. metric: a
    figure of summary.json. jobs: points at a time; default: as many as there are cores for. by: "simulate": all nodes
    of a point in one process; "processes": a process per node. again: repeat finished points. every_model: keep the
    models of all nodes. best_by: keys; tables have only the best combination for each of their values. within: keys;
    combinations are compared with the best one that has the same values of these. target: "accuracy=0.9" adds the cost
    until the mean over the nodes reached this value. rounds, name, run_dir: as in `Experiment.run`. progress: whether
    to show it; or a Watcher, which receives the events.

    Ctrl-C lets the points in progress finish their round, then raises RunInterrupted, whose `sweep` has the finished
    points. Points that fail are in `points`; raises UsageError if all points have problems.
    """
    from decentnode.cli.sweep_watcher import ConsoleWatcher
    from decentnode.sweeps import files
    from decentnode.sweeps.conduct import Watcher, conduct
    from decentnode.sweeps.plan import Plan, plan
    from decentnode.sweeps.space import axes

    if random is not None and optuna is not None:
        raise UsageError("random and optuna cannot be combined, since both choose the combinations to try: give one "
                         "of them")
    experiment = config if isinstance(config, Experiment) else Experiment.from_config(config)
    forkserver.start()
    planned = plan(Plan(
        experiment._sweep_request(sections, rounds=rounds, name=name, run_dir=run_dir), axes(grid), seeds,
        "random" if random else "optuna" if optuna else "grid", random or optuna, halving, least_rounds, metric, jobs,
        by, again, every_model, (best_by,) if isinstance(best_by, str) else tuple(best_by),
        (within,) if isinstance(within, str) else tuple(within), target,
    ))  # fmt: skip
    if isinstance(progress, Watcher):
        state = conduct(planned, progress)
    elif not progress:
        state = conduct(planned, Watcher())
    else:
        output = Output(sys.stdout, sys.stderr)
        watcher = ConsoleWatcher(output)
        try:
            state = conduct(planned, watcher)
        finally:
            watcher.end()
            output.close(DRAIN_SECONDS)
    result = Sweep(state)
    files.write(result._results, planned.folder)
    if state.exit_code > 128:
        error = RunInterrupted(f"stopped after {len(state.ended)} of {state.total} points; finished points are "
                               "kept", None,
                               state.exit_code)  # fmt: skip
        error.sweep = result  # type: ignore[attr-defined]
        raise error
    return result


def _parsed(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # such as 1e-4, which YAML 1.1 reads as a string
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _with_values(rows: Iterable[Mapping[str, Any]], results: Results) -> list[dict[str, Any]]:
    """Returns the rows with the values of swept keys, which are texts, converted such that tables can be grouped by
    them: numbers and other scalars as such, sections to their short text in printed tables, lists unchanged."""
    from decentnode.sweeps.space import short_values

    rows, keys = list(rows), {key for each in results.rows for key, _ in each.settings}
    values: dict[tuple[str, str], Any] = {}
    for key in keys:
        for text, short in short_values(row[key] for row in rows if isinstance(row.get(key), str)).items():
            value = _parsed(text)
            values[key, text] = short if isinstance(value, dict | list) else value
    return [{name: values.get((name, value), value) if isinstance(value, str) else value for name, value in row.items()}
            for row in rows]  # fmt: skip
