"""What a tracker is: a class whose calls are made one after the other, in a process that has nothing else to do."""

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
    """The run that a tracker is told of."""

    path: Path
    """The run directory on this machine."""
    name: str
    """Of the experiment."""
    config: Mapping[str, Any]
    """All values of the experiment, as config.resolved.yaml has them."""
    machine: int
    """The machine, counted from 0, whose nodes are told of."""

    @property
    def folder(self) -> Path:
        """Where a tracker may keep files: RUN/trackers."""
        return self.path / "trackers"

    @property
    def title(self) -> str:
        """A name that no other run has: the folder's, with the experiment's before it."""
        return f"{self.name}/{self.path.name}"


@dataclass(frozen=True)
class Point:
    """The figures of this machine's nodes in one round, or in the evaluation after so many."""

    round: int
    """How many rounds are finished."""
    time: float
    """Seconds since 1970, of the last record in it."""
    values: Mapping[str, float]
    """By name, such as `train/loss` or `test/accuracy`; finite."""


class Tracker(component.Component, abc.ABC):
    """Takes a run's figures. Made, called and closed in one thread; a call may block or raise: no node notices."""

    Config: ClassVar[type[component.Config]] = TrackerConfig
    config: TrackerConfig
    needs: ClassVar[tuple[str, str]] = ("", "")
    """The module that has to be there, and the extra of decentnode that installs it; empty for what is always there."""

    def __init__(self, config: component.Config, run: TrackedRun) -> None:
        """Raises EnvironmentFault where the library is not installed, and whatever that raises."""
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
        """Where to look, in words for the console; "" where there is nothing to say."""
        return ""

    def record(self, uid: int, record: Mapping[str, Any]) -> None:
        """Take a record of a node as it stands in its metrics.jsonl. Nothing, unless a tracker wants more than
        points."""

    @abc.abstractmethod
    def log(self, point: Point) -> None:
        """Take the figures of a round or an evaluation; rounds come in order, as far as nodes keep pace."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over. summary: as in summary.json; None where it has none, on other machines than the first too.
        Whatever is not yet where it belongs is written: blocking."""
