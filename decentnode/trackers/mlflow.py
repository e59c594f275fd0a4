"""The tracker `mlflow`: logs points to a run of MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from decentnode.config import component
from decentnode.trackers.base import Point, TrackedRun, Tracker, TrackerConfig

MAX_VALUE = 500
"""Longest value of a parameter in characters; servers refuse longer ones."""
AT_ONCE = 100
"""The most parameters that servers accept in one call."""


class MLflowConfig(TrackerConfig):
    uri: str | None = None
    """Tracking server or store, such as ``http://host:5000`` or ``sqlite:////home/me/mlflow.db``. Default:
    MLFLOW_TRACKING_URI if set, else MLflow's own default."""
    experiment: str | None = None
    """MLflow experiment of the run. Default: the name of this experiment."""


class MLflow(Tracker):
    """Creates a run of MLflow with the experiment's values as parameters and, at the end, its summary as tags. The
    extra installs mlflow-skinny, which talks to a server; for a local store, install mlflow."""

    Config: ClassVar[type[component.Config]] = MLflowConfig
    config: MLflowConfig
    needs: ClassVar[tuple[str, str]] = ("mlflow", "mlflow")

    def __init__(self, config: component.Config, run: TrackedRun) -> None:
        super().__init__(config, run)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self.config.uri)
        name = self.config.experiment or run.name
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        machine = f" machine {run.machine}" if run.machine else ""
        made = self._client.create_run(experiment, run_name=f"{run.title}{machine}",
                                       tags={"decentnode.run": str(run.path)})  # fmt: skip
        self._id: str = made.info.run_id
        params = [Param(key, value[:MAX_VALUE]) for key, value in flat(run.config)]
        for begin in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._id, params=params[begin : begin + AT_ONCE])

    @property
    def place(self) -> str:
        return f"run {self._id} of {self._client.tracking_uri}"

    def log(self, point: Point) -> None:
        from mlflow.entities import Metric

        milliseconds = round(1000 * point.time)
        self._client.log_batch(self._id, [Metric(name, value, milliseconds, point.round)
                                          for name, value in point.values.items()])  # fmt: skip

    def close(self, summary: Mapping[str, Any] | None) -> None:
        for key, value in (summary or {}).items():
            if isinstance(value, str | int | float):
                self._client.set_tag(self._id, f"summary.{key}", str(value))
        whole = summary is None or summary.get("status") == "finished"
        self._client.set_terminated(self._id, "FINISHED" if whole else "FAILED")


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, value as a string) of all leaves."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
