"""The process of one tracker: `python -m decentnode.trackers.process RUN CONFIG --status FD`.

It reads the nodes' records until its standard input is closed, which means that the run has ended in any way; then it
reads the rest and closes the tracker. Its messages to the launcher are lines on a pipe: "= PLACE", "! ERROR" or text.
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
from decentnode.config.component import add_module_folder, load_class
from decentnode.metrics import summary as summaries
from decentnode.trackers import TRACKERS
from decentnode.trackers.base import Point, TrackedRun, Tracker
from decentnode.trackers.follow import Follower
from decentnode.trackers.points import Points

POLL_SECONDS = 1.0
FAILURES = 10
"""The tracker is given up after this many failed calls without an accepted point in between."""


class TrackerGivenUp(Exception):
    """The tracker raised in FAILURES calls without accepting a point in between."""


class Feed:
    """Passes the records of a run to one tracker."""

    def __init__(self, run: TrackedRun, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._run, self._tracker, self._say = run, tracker, say
        self._follower = Follower(run.path)
        self._points = Points(self._follower.uids, tracker.config.every)
        self.accepted = 0
        """How many points the tracker accepted."""
        self.refused = 0
        """How many calls of the tracker raised an error."""
        self._consecutive_failures = 0

    def poll(self) -> None:
        """Passes on the records written so far. Raises TrackerGivenUp."""
        for uid, record in self._follower.poll():
            self._call(self._tracker.record, uid, record)
            self._log(self._points.take(uid, record, clock.now()))
        self._log(self._points.overdue(clock.now()))

    def finish(self) -> None:
        """Passes on all remaining records and closes the tracker. Raises TrackerGivenUp, and what closing the tracker
        raises.
        """
        while True:
            self.poll()
            if self._follower.at_end():
                break
        self._log(self._points.remaining())
        try:
            summary = summaries.read(self._run.path / "summary.json")
        except (OSError, ValueError):
            summary = None
        self._tracker.close(summary)

    def _log(self, points: Iterable[Point]) -> None:
        for point in points:
            if self._call(self._tracker.log, point):
                self.accepted += 1
                self._consecutive_failures = 0

    def _call(self, function: Callable[..., None], *given: Any) -> bool:
        """Calls a method of the tracker. Returns whether it succeeded; after an error the next call may succeed. Raises
        TrackerGivenUp after FAILURES errors without an accepted point in between."""
        try:
            function(*given)
        except Exception as error:
            self.refused += 1
            self._consecutive_failures += 1
            traceback.print_exc()
            if self._consecutive_failures == 1:
                self._say(f"does not accept the figures ({_one_line(error)})")
            if self._consecutive_failures >= FAILURES:
                raise TrackerGivenUp(f"refused {FAILURES} points in a row, the last with {_one_line(error)}") from error
            return False
        return True


def make(name_and_keys: dict[str, Any], run: TrackedRun) -> Tracker:
    """Returns the tracker for a section of the config. Raises what its class raises."""
    tracker_class = load_class(str(name_and_keys["name"]), TRACKERS, "tracker")
    run.folder.mkdir(exist_ok=True)
    tracker = tracker_class(tracker_class.Config.model_validate(name_and_keys), run)
    assert isinstance(tracker, Tracker)
    return tracker


def opened(path: Path, machine: int = 0) -> TrackedRun:
    """Returns the `TrackedRun` for a run directory. Raises OSError or ValueError if it has no readable config."""
    config = yaml.safe_load((path / "config.resolved.yaml").read_text(encoding="utf-8"))
    return TrackedRun(path, str(config["name"]), config, machine)


def _one_line(error: BaseException) -> str:
    """Returns an error as text of a single line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def main(argv: list[str] | None = None) -> int:
    """Runs a tracker. Blocking until standard input is closed. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("config", help="the tracker's section, as JSON")
    parser.add_argument("--machine", type=int, default=0)
    parser.add_argument("--status", type=int, default=1, help="file descriptor for lines to the launcher")
    parser.add_argument("--beside", type=Path, help="folder in which modules of the user's own may lie")
    arguments = parser.parse_args(argv)

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(arguments.status, f"{text}\n".encode()[:1000])

    if arguments.beside is not None:
        add_module_folder(arguments.beside)
    try:
        run = opened(arguments.run, arguments.machine)
        tracker = make(json.loads(arguments.config), run)
        if tracker.place:
            say(f"= {tracker.place}")
        feed = Feed(run, tracker, say)
        while not select.select([sys.stdin], [], [], POLL_SECONDS)[0] or os.read(sys.stdin.fileno(), 4096):
            feed.poll()
        feed.finish()
    except Exception as error:
        traceback.print_exc()
        say(f"! {error}" if isinstance(error, TrackerGivenUp) else f"! {_one_line(error)}")
        return 1
    if feed.refused:
        say(f"! did not accept {feed.refused} of {feed.accepted + feed.refused} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
