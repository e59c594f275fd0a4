"""The tracker `wandb`: logs points to a run of Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from decentnode.config import component
from decentnode.trackers.base import Point, TrackedRun, Tracker, TrackerConfig


class WandBConfig(TrackerConfig):
    project: str = "decentnode"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the run. Default: the library's own choice."""
    mode: Literal["online", "offline", "shared", "disabled"] | None = None
    """online sends to the server; offline writes files that ``wandb sync`` sends later. Default: WANDB_MODE if set,
    else online."""


class WandB(Tracker):
    """Creates a run of Weights & Biases with the experiment's config and, at the end, its summary. Its files are in
    RUN/trackers/wandb. The machines of an experiment create runs of one group."""

    Config: ClassVar[type[component.Config]] = WandBConfig
    config: WandBConfig
    needs: ClassVar[tuple[str, str]] = ("wandb", "wandb")

    def __init__(self, config: component.Config, run: TrackedRun) -> None:
        super().__init__(config, run)
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        machine = f" machine {run.machine}" if run.machine else ""
        self._run = wandb.init(
            project=self.config.project, entity=self.config.entity, mode=self.config.mode, dir=str(run.folder),
            name=f"{run.title}{machine}", group=run.name, config=dict(run.config),
        )  # fmt: skip
        # Training figures and evaluations of a round are logged at different times, so the x axis is the round instead
        # of the order of the calls.
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    @property
    def place(self) -> str:
        return str(getattr(self._run, "url", None) or self.run.folder / "wandb")

    def log(self, point: Point) -> None:
        self._run.log({"round": point.round, **point.values})

    def close(self, summary: Mapping[str, Any] | None) -> None:
        flat = {key: value for key, value in (summary or {}).items() if isinstance(value, str | int | float)}
        self._run.summary.update(flat)
        self._run.finish(exit_code=0 if summary is None or summary.get("status") == "finished" else 1)
