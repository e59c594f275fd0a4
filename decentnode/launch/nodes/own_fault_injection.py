"""Injects kill and pause faults into a node that runs in the foreground (`decentnode join`, `decentnode node`). It has
no supervisor that could do it, so the process injects them into itself."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from decentnode import clock
from decentnode.faults import Kill, Pause, Plan
from decentnode.launch.files.fault_events import record_fault

WAKES = 'kill -STOP "$0"; sleep "$1"; kill -CONT "$0"'
"""Shell command that suspends a process and resumes it later; a suspended process cannot resume itself."""


class OwnFaultInjector:
    """Kills and pauses the node of this process as the fault plan says."""

    def __init__(self, plan: Plan, uid: int, directory: Path, tell: Callable[[str], None]) -> None:
        """plan: the resolved faults. directory: the run's. tell: called with a sentence before each fault is injected.
        """
        self._plan, self._uid, self._directory, self._tell = plan, uid, directory, tell
        self._due = sorted(
            (each.at_seconds, index) for index, each in enumerate(plan)
            if isinstance(each, Kill | Pause) and each.concerns(uid) and each.at_seconds is not None
        )  # fmt: skip
        self._over = threading.Event()
        self._wakers: list[subprocess.Popen[bytes]] = []

    def begin(self, zero: float) -> None:
        """Starts the timer for faults, counted from `zero` (`clock.now()`), the start of the run. Faults that were due
        before this call are skipped."""
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
        """Injects fault `index` of the plan; a kill does not return. since: when the fault was due, if that is not now.
        A pause is shortened by the delay since then, so that a pause that came due during another one does not end
        later than the plan says."""
        fault = self._plan[index]
        if self._over.is_set():
            return
        left = 0.0
        if isinstance(fault, Pause):
            left = fault.seconds - (0.0 if since is None else clock.now() - since)
            if left <= 0:
                return
        self._tell(f"node {self._uid}: {fault.do}, as `faults` says")
        record_fault(self._directory, self._uid, fault.model_dump(mode="json", exclude_none=True))
        if isinstance(fault, Kill):
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            words = ["/bin/sh", "-c", WAKES, str(os.getpid()), f"{left:.3f}"]
            self._wakers.append(subprocess.Popen(words, start_new_session=True))

    def close(self) -> None:
        """Ends the injection of faults, because the node has ended."""
        self._over.set()
