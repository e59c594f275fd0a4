"""The base class of trackers, and the data that they get. A tracker's methods are called one after the other, in a
process of its own."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.errors import EnvironmentFault


class TrackerConfig(component.Config):
    every: int = Field(1, ge=1)
    """Rounds between two points of the training figures; every evaluation is reported."""


@dataclass(frozen=True)
class TrackedRun:
    """The run whose figures a tracker gets."""

    path: Path
    """The run directory on this machine."""
    name: str
    """The experiment's name."""
    config: Mapping[str, Any]
    """All values of the experiment, as config.resolved.yaml has them."""
    machine: int
    """The machine, counted from 0, whose nodes' figures the tracker gets."""

    @property
    def folder(self) -> Path:
        """The folder for a tracker's files: RUN/trackers."""
        return self.path / "trackers"

    @property
    def title(self) -> str:
        """A unique name of the run: the experiment's name and the folder's."""
        return f"{self.name}/{self.path.name}"


@dataclass(frozen=True)
class Point:
    """The figures of this machine's nodes for one round, or for the evaluation after a round."""

    round: int
    """The number of finished rounds."""
    time: float
    """Time of the last record in the point, in seconds since 1970."""
    values: Mapping[str, float]
    """Figures by name, such as `train/loss` or `test/accuracy`; all finite."""


class Tracker(component.Component, abc.ABC):
    """Takes a run's figures. It is made, called and closed in one thread. A call may block or raise: the nodes are not
    affected."""

    Config: ClassVar[type[component.Config]] = TrackerConfig
    config: TrackerConfig
    needs: ClassVar[tuple[str, str]] = ("", "")
    """The required module, and the extra of decentnode that installs it; empty if nothing has to be installed."""

    def __init__(self, config: component.Config, run: TrackedRun) -> None:
        """Raises EnvironmentFault if the library is not installed; errors of the library are passed on."""
        assert isinstance(config, TrackerConfig)
        self.config, self.run = config, run
        module, extra = self.needs
        if module:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise EnvironmentFault(f"{module} cannot be imported ({error}); pip install 'decentnode[{extra}]' "
                                       "installs it") from error  # fmt: skip

    @property
    def place(self) -> str:
        """Where the user finds the figures, as text for the console; "" for no text."""
        return ""

    def record(self, uid: int, record: Mapping[str, Any]) -> None:
        """Takes a record of a node's metrics.jsonl. Does nothing by default; for trackers that need more than points.
        """

    @abc.abstractmethod
    def log(self, point: Point) -> None:
        """Takes the figures of a round or an evaluation. The rounds of training points increase, and so do those of
        evaluations; records of nodes that are too far behind are left out."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Ends the tracker after the run, and sends what is still buffered. Blocking. summary: the contents of
        summary.json; None if there is none, as on all machines but the first."""
