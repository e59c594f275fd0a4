"""The process of one tracker: `python -m decentnode.trackers.process RUN CONFIG --status FD`.

It reads what the nodes record until its standard input ends, which is when the launcher has ended the run, in whichever
way; then the rest, and closes the tracker. What it has to say to the launcher it writes to a pipe, a line each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from decentnode import clock
from decentnode.config.component import load_class, look_beside
from decentnode.metrics import summary as summaries
from decentnode.trackers import TRACKERS
from decentnode.trackers.base import Point, TrackedRun, Tracker
from decentnode.trackers.follow import Follower
from decentnode.trackers.points import Points

POLL_SECONDS = 1.0
FAILURES = 10
"""Points in a row that a tracker may refuse; then it is given up."""


class GivenUp(Exception):
    """The tracker refused FAILURES points in a row."""


class Feed:
    """Takes what a run records to one tracker."""

    def __init__(self, run: TrackedRun, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._run, self._tracker, self._say = run, tracker, say
        self._follower = Follower(run.path)
        self._points = Points(self._follower.uids, tracker.config.every)
        self.told = 0
        """Points that the tracker took."""
        self.refused = 0
        """Points that it raised for."""
        self._in_a_row = 0

    def poll(self) -> None:
        """Take what is there by now. Raises GivenUp."""
        for uid, record in self._follower.poll():
            self._call(self._tracker.record, uid, record)
            self._log(self._points.take(uid, record, clock.now()))
        self._log(self._points.overdue(clock.now()))

    def finish(self) -> None:
        """Take all that is left, and close the tracker. Raises what closing does, and GivenUp."""
        while True:
            self.poll()
            if self._follower.at_end():
                break
        self._log(self._points.rest())
        try:
            summary = summaries.read(self._run.path / "summary.json")
        except (OSError, ValueError):
            summary = None
        self._tracker.close(summary)

    def _log(self, points: Iterable[Point]) -> None:
        for point in points:
            if self._call(self._tracker.log, point):
                self.told += 1
                self._in_a_row = 0

    def _call(self, function: Callable[..., None], *given: Any) -> bool:
        """Returns whether the tracker took it: one that raises for a point may take the next one."""
        try:
            function(*given)
        except Exception as error:
            self.refused += 1
            self._in_a_row += 1
            traceback.print_exc()
            if self._in_a_row == 1:
                self._say(f"does not accept the figures ({_short(error)})")
            if self._in_a_row >= FAILURES:
                raise GivenUp(f"refused {FAILURES} points in a row, the last with {_short(error)}") from error
            return False
        return True


def make(name_and_keys: dict[str, Any], run: TrackedRun) -> Tracker:
    """Returns a tracker of its section. Raises what its class does."""
    chosen = load_class(str(name_and_keys["name"]), TRACKERS, "tracker")
    run.folder.mkdir(exist_ok=True)
    made = chosen(chosen.Config.model_validate(name_and_keys), run)
    assert isinstance(made, Tracker)
    return made


def opened(path: Path, machine: int = 0) -> TrackedRun:
    """Returns a run directory as trackers see it. Raises OSError and ValueError where it has no readable config."""
    config = yaml.safe_load((path / "config.resolved.yaml").read_text(encoding="utf-8"))
    return TrackedRun(path, str(config["name"]), config, machine)


def _short(error: BaseException) -> str:
    """Returns an error as part of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def main(words: list[str] | None = None) -> int:
    """Blocking until standard input ends. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("config", help="the tracker's section, as JSON")
    parser.add_argument("--machine", type=int, default=0)
    parser.add_argument("--status", type=int, default=1, help="file descriptor for lines to the launcher")
    parser.add_argument("--beside", type=Path, help="folder in which modules of the user's own may lie")
    given = parser.parse_args(words)

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(given.status, f"{text}\n".encode()[:1000])

    if given.beside is not None:
        look_beside(given.beside)
    try:
        run = opened(given.run, given.machine)
        tracker = make(json.loads(given.config), run)
        if tracker.place:
            say(f"= {tracker.place}")
        feed = Feed(run, tracker, say)
        while not select.select([sys.stdin], [], [], POLL_SECONDS)[0] or os.read(sys.stdin.fileno(), 4096):
            feed.poll()
        feed.finish()
    except Exception as error:
        traceback.print_exc()
        say(f"! {error}" if isinstance(error, GivenUp) else f"! {_short(error)}")
        return 1
    if feed.refused:
        say(f"! did not accept {feed.refused} of {feed.told + feed.refused} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
