"""Writes snapshots in a thread of its own, one after the other, and removes those that nobody needs any more."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decentnode import clock
from decentnode.checkpoint import store
from decentnode.checkpoint.store import Cut, Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """The outcome of one snapshot."""

    cut: Cut
    bytes: int
    seconds: float
    cpu_seconds: float
    """CPU time of the writing thread."""
    problem: str = ""
    """Why it is not whole; empty where it is."""


class Writer:
    """At most one snapshot is written while the training goes on; `give` waits for the one before. All methods belong
    to the training thread."""

    def __init__(self, folder: Path) -> None:
        """folder: checkpoints/ of the run; made by the first snapshot."""
        self._folder = folder
        self._given: queue.SimpleQueue[Snapshot | Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[Written] = deque()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def wait(self, timeout_seconds: float) -> bool:
        """Blocking until nothing is being written. Returns False where that took longer than the time-out."""
        return self._idle.wait(timeout_seconds)

    def give(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot, after `wait`. Not blocking."""
        self._start()
        self._idle.clear()
        self._given.put(snapshot)

    def do(self, *works: Callable[[], None]) -> None:
        """Do something small after what was given before is written, in the writer's thread. Not blocking."""
        self._start()
        for work in works:
            self._given.put(work)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
            self._thread.start()

    def results(self) -> list[Written]:
        """Returns what was written since the last call."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def close(self, timeout_seconds: float) -> bool:
        """Blocking until all is done; a later `give` begins anew. Returns False where that took longer than the
        time-out."""
        if self._thread is None:
            return True
        self._given.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            if not isinstance(given, Snapshot):
                try:
                    given()
                except OSError as error:
                    logger.warning("%s", error)
                continue
            began, used = clock.now(), clock.thread_cpu()
            size, problem = 0, ""
            try:
                size = store.write(self._folder, given)
            except Exception as error:  # whatever it is, training goes on, and hears of it
                problem = str(error) or repr(error)
                logger.warning("the checkpoint after round %d could not be written: %s", given.cut.round, problem)
                logger.debug("what was raised of it", exc_info=error)
            self._done.append(
                Written(given.cut, size, clock.now() - began, clock.thread_cpu() - used, problem)
            )
            del given  # its memory is free for the next snapshot
            self._idle.set()
