"""The faults that strike whole processes, brought about by the supervisor: it outlives them."""

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
from decentnode.launch.files.strike_notes import note_strike
from decentnode.launch.supervising.workers import Worker

KINDS = ("kill", "pause", "restart")


class Processes(Protocol):
    """The processes that are struck."""

    def worker_of(self, uid: int) -> Worker | None:
        """The one that runs a node; None where it has ended."""

    def restart_struck(self, uid: int) -> None:
        """Start a node again that has died."""


class Strikes:
    """Of the nodes of one machine."""

    def __init__(
        self, plan: Sequence[Mapping[str, Any]], local: Sequence[int], directory: Path | None
    ) -> None:
        """plan: resolved faults as plain data."""
        self._plan, self._directory = plan, directory
        self._due = [
            (float(each["at_seconds"]), index, uid)
            for index, each in enumerate(plan) if each["do"] in KINDS and "at_seconds" in each
            for uid in each["nodes"] if uid in local
        ]  # fmt: skip
        heapq.heapify(self._due)
        self._paused: list[tuple[float, Worker]] = []
        """Who is suspended, each once, and until when (`clock.now()`)."""
        self.began: float | None = None
        """When the run began (`clock.now()`); None before."""
        self.counts: Counter[str] = Counter()
        """How many processes were struck, by the kind of fault."""
        self._over = False

    def begin(self, now: float) -> None:
        """All nodes have joined."""
        self.began = now

    @property
    def next(self) -> float:
        """When `tick` has something to do (`clock.now()`)."""
        due = math.inf if self.began is None or self._over or not self._due else self.began + self._due[0][0]
        return min((due, *(until for until, _ in self._paused)))

    def tick(self, now: float, processes: Processes) -> None:
        """Do what is due."""
        over = [worker for until, worker in self._paused if until <= now]
        self._paused = [each for each in self._paused if each[0] > now]
        for worker in over:
            _signal(worker, signal.SIGCONT)
        while self.began is not None and not self._over and self._due and self.began + self._due[0][0] <= now:
            _, index, uid = heapq.heappop(self._due)
            self.strike(uid, index, processes)

    def not_due(self, now: float) -> str:
        """Returns a sentence about the faults, of any kind, whose time has not come at `now`; "" where there are none,
        or the run did not begin."""
        late = sorted(float(each.get("at_seconds", 0.0)) for each in self._plan)
        late = [] if self.began is None else [at for at in late if at > now - self.began]
        if not late or self.began is None:
            return ""
        return f"{len(late)} of {len(self._plan)} faults did not occur: the run ended after " \
               f"{now - self.began:.1f} s, the first of them was due at {late[0]:g} s"  # fmt: skip

    def stop(self) -> None:
        """The run ends: nobody is struck any more, and who is suspended goes on."""
        self._over = True
        while self._paused:
            _signal(self._paused.pop()[1], signal.SIGCONT)

    def strike(self, uid: int, index: int, processes: Processes) -> None:
        """Bring a fault of the plan about; nothing happens to a node that has ended, or once the run ends."""
        fault, worker = self._plan[index], processes.worker_of(uid)
        if self._over or (worker is None) != (fault["do"] == "restart"):
            return
        self.counts[fault["do"]] += 1
        if worker is None:
            processes.restart_struck(uid)
        elif fault["do"] == "kill":
            worker.struck = True
            worker.kill()
        else:
            self._pause(worker, clock.now() + float(fault["seconds"]))
        note_strike(self._directory, uid, fault)

    def _pause(self, worker: Worker, until: float) -> None:
        """Suspend a process; one that is suspended already stays so for the longer of both times."""
        longest = max([until, *(before for before, each in self._paused if each is worker)])
        self._paused = [(longest, worker), *(each for each in self._paused if each[1] is not worker)]
        _signal(worker, signal.SIGSTOP)


def _signal(worker: Worker, number: int) -> None:
    if worker.alive and worker.process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)
