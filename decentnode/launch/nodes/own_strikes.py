"""The faults of whole processes as a node in the foreground meets them (`decentnode join`, `decentnode node`): no
supervisor stands beside it, so that it strikes itself."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from decentnode import clock
from decentnode.faults import Kill, Pause, Plan
from decentnode.launch.files.strike_notes import note_strike

WAKES = 'kill -STOP "$0"; sleep "$1"; kill -CONT "$0"'
"""A shell that suspends a process and wakes it: who is suspended wakes nobody."""


class OwnStrikes:
    """Kills and pauses of the node of this process."""

    def __init__(self, plan: Plan, uid: int, directory: Path, tell: Callable[[str], None]) -> None:
        """plan: resolved. directory: of the run. tell: is told of each before it comes about."""
        self._plan, self._uid, self._directory, self._tell = plan, uid, directory, tell
        self._due = sorted(
            (each.at_seconds, index) for index, each in enumerate(plan)
            if isinstance(each, Kill | Pause) and each.concerns(uid) and each.at_seconds is not None
        )  # fmt: skip
        self._over = threading.Event()
        self._wakers: list[subprocess.Popen[bytes]] = []

    def begin(self, zero: float) -> None:
        """The run began at `zero` (`clock.now()`): what was due before this call does not come about."""
        now = clock.now()
        due = [(zero + at, index) for at, index in self._due if zero + at >= now]
        if due:
            threading.Thread(target=self._wait, args=(due,), name="strikes", daemon=True).start()

    def _wait(self, due: list[tuple[float, int]]) -> None:
        for at, index in due:
            if self._over.wait(max(0.0, at - clock.now())):
                return
            self.strike(index, at)

    def strike(self, index: int, since: float | None = None) -> None:
        """Bring a fault of the plan about; does not return from a kill. since: when it was due, where that is not now;
        a pause is then as much shorter, as one that comes due in another lasts no longer than the plan says."""
        fault = self._plan[index]
        if self._over.is_set():
            return
        left = 0.0
        if isinstance(fault, Pause):
            left = fault.seconds - (0.0 if since is None else clock.now() - since)
            if left <= 0:
                return
        self._tell(f"node {self._uid}: {fault.do}, as `faults` says")
        note_strike(self._directory, self._uid, fault.model_dump(mode="json", exclude_none=True))
        if isinstance(fault, Kill):
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            words = ["/bin/sh", "-c", WAKES, str(os.getpid()), f"{left:.3f}"]
            self._wakers.append(subprocess.Popen(words, start_new_session=True))

    def close(self) -> None:
        """The node has ended: nothing strikes it any more."""
        self._over.set()
