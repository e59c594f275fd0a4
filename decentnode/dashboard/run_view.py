"""One run that a page shows: combines its recording, the status of its nodes and its machines to lines of changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.dashboard.frames import EDGE_COLUMNS, NODE_COLUMNS
from decentnode.dashboard.live import Machines, Status, state_of_run
from decentnode.dashboard.recording import Recording
from decentnode.dashboard.tail import Replaced
from decentnode.metrics.writer import finite
from decentnode.report.reading.repeats import RunResult, read

READ_SECONDS = 0.15
"""Longest time that one read of the files may take."""
STATE_SECONDS = 1.0
POLL_SECONDS = 0.15
"""Least time between two reads of the files of a run, for any number of pages."""
CHANGES = ("nodes", "edges", "points", "evaluations", "events", "status", "uids", "pairs")
MAX_CONFIG_BYTES = 256 << 10

Since = tuple[int, int, int, str]
"""What a client has received: (incarnation of the run's folder, version of the recording, version of the
status, state)."""


class RunView:
    """The data of one run that pages show. Not thread-safe. All methods are blocking."""

    def __init__(self, id: str, path: Path) -> None:
        self.id, self.path = id, path
        self.watchers = 0
        """Number of open streams."""
        self._incarnation = 1
        """Number of the run that the folder holds, from 1; a run that replaces another one there increments it."""
        self._begin()

    def _begin(self) -> None:
        self._recording = Recording(self.path)
        self._status, self._machines = Status(self.path), Machines(self.path)
        self._more = True
        self._polled = self._looked = -1e9
        self._state: dict[str, Any] = {}

    def _poll(self) -> None:
        now = clock.now()
        if not self._more and now - self._polled < POLL_SECONDS:
            return
        try:
            self._more = self._recording.poll(READ_SECONDS)
        except Replaced:  # another run was written to the same folder
            self._incarnation += 1
            self._begin()
            return
        if now - self._looked >= STATE_SECONDS:
            self._looked = now
            self._state = state_of_run(self.path)
        if self._state.get("state") != "finished" or not self._status.version:
            self._status.poll(self._recording.uids)
        self._polled = clock.now()

    def next_line(self, since: Since) -> tuple[bytes | None, Since, bool]:
        """Returns (a line of JSON with the changes, or None without any; what the client has received with it; whether
        the files have more that was not read yet)."""
        self._poll()
        anew = since[0] != self._incarnation
        version, status = (0, 0) if anew else since[1:3]
        state = str(self._state.get("state"))
        changes = self._recording.changes(version)
        machines = self._machines.poll(self._status.pids)
        changes |= {
            "run": self.id, "anew": anew, "state": state, "status": self._status.changes(status),
            "machines": machines, "now": clock.wall(), "why": self._state.get("why", ""),
        }  # fmt: skip
        if anew:
            changes["about"] = self._about()
        sent = self._incarnation, self._recording.version, self._status.version, state
        if not anew and state == since[3] != "running" and not any(changes[key] for key in CHANGES):
            return None, sent, self._more
        return json.dumps(finite(changes), separators=(",", ":")).encode() + b"\n", sent, self._more

    def _about(self) -> dict[str, Any]:
        try:
            ran = read(self.path)
        except Exception:
            ran = RunResult(self.path, self.path.parent.name, None, {}, "", {})
        measured = self._recording.measured
        return {
            "name": ran.name, "seed": ran.seed, "rounds": _number(ran.config.get("node.rounds")),
            "node_columns": NODE_COLUMNS, "edge_columns": EDGE_COLUMNS,
            "metrics": [{"name": each.name, "text": each.text, "suffix": each.suffix, "scale": each.scale,
                         "digits": each.digits, "better": each.better, "logarithmic": each.logarithmic}
                        for each in measured.metrics],
        }  # fmt: skip

    def packed(self, first: int, count: int) -> bytes:
        """Returns frames as `Frames.packed` does."""
        recording = self._recording
        if not recording.frames.kept:
            self._poll()
        return recording.frames.packed(first, count, len(recording.uids), len(recording.edges))

    def config(self) -> str:
        """Returns the experiment's config as the user wrote it; "" if it cannot be read."""
        try:
            with open(self.path / "config.yaml", encoding="utf-8", errors="replace") as file:
                return file.read(MAX_CONFIG_BYTES)
        except OSError:
            return ""


def _number(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None
