"""Injects the faults of whole processes (kill, pause, restart). The supervisor does it, because it outlives them."""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from decentnode import clock
from decentnode.launch.files.fault_events import record_fault
from decentnode.launch.supervising.workers import Worker

KINDS = ("kill", "pause", "restart")


class Processes(Protocol):
    """The processes into which faults are injected."""

    def worker_of(self, uid: int) -> Worker | None:
        """Returns the process that runs a node; None if it has ended."""

    def restart_for_fault(self, uid: int) -> None:
        """Restarts a node that has died."""


class ProcessFaults:
    """Injects the process faults of a plan into the nodes of one machine."""

    def __init__(
        self, plan: Sequence[Mapping[str, Any]], local: Sequence[int], directory: Path | None
    ) -> None:
        """plan: the resolved faults as plain data. local: uids of this machine. directory: the run's; None if nothing
        is written."""
        self._plan, self._directory = plan, directory
        self._due = [
            (float(each["at_seconds"]), index, uid)
            for index, each in enumerate(plan) if each["do"] in KINDS and "at_seconds" in each
            for uid in each["nodes"] if uid in local
        ]  # fmt: skip
        heapq.heapify(self._due)
        self._paused: list[tuple[float, Worker]] = []
        """Suspended processes, each once, with the time until which they are (`clock.now()`)."""
        self.began: float | None = None
        """When the run began (`clock.now()`); None before."""
        self.counts: Counter[str] = Counter()
        """Number of injected faults by kind."""
        self._over = False

    def begin(self, now: float) -> None:
        """Starts the clock of timed faults at `now`, because all nodes have joined."""
        self.began = now

    @property
    def next_due_time(self) -> float:
        """When `tick` next has something to do (`clock.now()`); infinity if never."""
        due = math.inf if self.began is None or self._over or not self._due else self.began + self._due[0][0]
        return min((due, *(until for until, _ in self._paused)))

    def tick(self, now: float, processes: Processes) -> None:
        """Injects the faults that are due, and resumes processes whose pause is over."""
        expired = [worker for until, worker in self._paused if until <= now]
        self._paused = [each for each in self._paused if each[0] > now]
        for worker in expired:
            _signal(worker, signal.SIGCONT)
        while self.began is not None and not self._over and self._due and self.began + self._due[0][0] <= now:
            _, index, uid = heapq.heappop(self._due)
            self.inject(uid, index, processes)

    def undue_notice(self, now: float) -> str:
        """Returns a sentence about the timed faults, of any kind, that are not due yet at `now`; "" if there are none,
        or the run did not begin."""
        undue = sorted(float(each.get("at_seconds", 0.0)) for each in self._plan)
        undue = [] if self.began is None else [at for at in undue if at > now - self.began]
        if not undue or self.began is None:
            return ""
        return f"{len(undue)} of {len(self._plan)} faults did not occur: the run ended after " \
               f"{now - self.began:.1f} s, the first of them was due at {undue[0]:g} s"  # fmt: skip

    def stop(self) -> None:
        """Ends the injection of faults, because the run ends, and resumes suspended processes."""
        self._over = True
        while self._paused:
            _signal(self._paused.pop()[1], signal.SIGCONT)

    def inject(self, uid: int, index: int, processes: Processes) -> None:
        """Injects fault `index` of the plan into node `uid`. Does nothing if the node has ended (for a restart: if it
        runs), or once the run ends."""
        fault, worker = self._plan[index], processes.worker_of(uid)
        if self._over or (worker is None) != (fault["do"] == "restart"):
            return
        self.counts[fault["do"]] += 1
        if worker is None:
            processes.restart_for_fault(uid)
        elif fault["do"] == "kill":
            worker.killed_by_fault = True
            worker.kill()
        else:
            self._pause(worker, clock.now() + float(fault["seconds"]))
        record_fault(self._directory, uid, fault)

    def _pause(self, worker: Worker, until: float) -> None:
        """Suspends a process until `until`; one that is already suspended, until the later of both times."""
        longest = max([until, *(before for before, each in self._paused if each is worker)])
        self._paused = [(longest, worker), *(each for each in self._paused if each[1] is not worker)]
        _signal(worker, signal.SIGSTOP)


def _signal(worker: Worker, number: int) -> None:
    if worker.alive and worker.process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)
