"""A tracker that fails at the moment and in the way that its section gives."""

from __future__ import annotations

import os
import time
from typing import ClassVar, Literal

from decentnode.config import component
from decentnode.trackers.base import Tracker, TrackerConfig


class FaultyConfig(TrackerConfig):
    at: Literal["start", "write", "third", "close", "never"] = "never"
    how: Literal["raise", "hang", "exit"] = "raise"


class Faulty(Tracker):
    """Writes the points that it takes to the file taken.txt until it fails."""

    Config: ClassVar[type[component.Config]] = FaultyConfig
    config: FaultyConfig

    def __init__(self, config, run):
        super().__init__(config, run)
        self._file = open(run.folder / "taken.txt", "w")  # noqa: SIM115
        self._count = 0
        self._fail("start")

    def _fail(self, at):
        if self.config.at != at:
            return
        if self.config.how == "exit":
            os._exit(7)
        if self.config.how == "hang":
            time.sleep(10_000)
        raise RuntimeError(f"nothing is right\nat {at}")

    def log(self, point):
        self._count += 1
        self._fail("write")
        if self._count == 3:
            self._fail("third")
        print(point.round, *point.values, file=self._file, flush=True)

    def close(self, summary):
        self._fail("close")
        print("closed", (summary or {}).get("status"), file=self._file, flush=True)


class Second(Faulty):
    """The same tracker under another name, because a run may list each name once."""


class Third(Faulty):
    """A third name."""
