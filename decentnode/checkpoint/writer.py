"""Writes snapshots in a background thread, one after the other, and does other small work on checkpoints there."""

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
    """Why the checkpoint could not be written; empty if it was."""


class Writer:
    """Writes one snapshot at a time in the background while training continues. All methods are for the training
    thread."""

    def __init__(self, folder: Path) -> None:
        """folder: checkpoints/ of the run; the first snapshot creates it."""
        self._folder = folder
        self._given: queue.SimpleQueue[Snapshot | Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[Written] = deque()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until no snapshot is being written. Blocking. Returns False if that took longer than the time-out."""
        return self._idle.wait(timeout_seconds)

    def give(self, snapshot: Snapshot) -> None:
        """Hands over a snapshot to write; to be called after `wait`. Not blocking."""
        self._start()
        self._idle.clear()
        self._given.put(snapshot)

    def do(self, *works: Callable[[], None]) -> None:
        """Queues small pieces of work for the writer's thread, after everything handed over before. Not blocking."""
        self._start()
        for work in works:
            self._given.put(work)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
            self._thread.start()

    def results(self) -> list[Written]:
        """Returns the outcomes of snapshots written since the last call."""
        results = []
        while self._done:
            results.append(self._done.popleft())
        return results

    def close(self, timeout_seconds: float) -> bool:
        """Waits until all work is done, and ends the thread; a later `give` starts a new one. Blocking. Returns False
        if that took longer than the time-out."""
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
            except Exception as error:  # training continues after any error, and gets it from `results`
                problem = str(error) or repr(error)
                logger.warning("the checkpoint after round %d could not be written: %s", given.cut.round, problem)
                logger.debug("what was raised of it", exc_info=error)
            self._done.append(
                Written(given.cut, size, clock.now() - began, clock.thread_cpu() - used, problem)
            )
            del given  # frees its memory for the next snapshot
            self._idle.set()
