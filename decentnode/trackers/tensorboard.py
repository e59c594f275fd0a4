"""The tracker `tensorboard`: writes points to an event file for TensorBoard, in RUN/trackers/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from decentnode.config import component
from decentnode.trackers.base import Point, TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes scalars by round into RUN/trackers/tensorboard; ``tensorboard --logdir runs`` shows all runs together. It
    needs neither TensorFlow nor torch."""

    needs: ClassVar[tuple[str, str]] = ("tensorboard", "tensorboard")

    def __init__(self, config: component.Config, run: TrackedRun) -> None:
        super().__init__(config, run)
        from tensorboard.summary import Writer

        self._folder = run.folder / "tensorboard"
        self._writer = Writer(str(self._folder))

    @property
    def place(self) -> str:
        return f"tensorboard --logdir {self._folder}"

    def log(self, point: Point) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.round, wall_time=point.time)
        self._writer.flush()

    def close(self, summary: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        self._writer.close()
