"""Virtual time: an event queue, and timers whose deadline may change."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from decentnode.clock import VirtualClock


class EventQueue:
    """A discrete-event queue: runs actions in the order of their times, and those of the same time in the order in
    which they were added."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.count = 0
        """Number of events that have been run."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def now(self) -> float:
        return self.clock.now()

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, over: Callable[[], bool], until: float) -> bool:
        """Runs events until `over()`, which is called before the first and after every event, is true. Returns False if
        it is not by the time `until`, or if no event is left."""
        while not over():
            if not self._events or self._events[0][0] > until:
                return False
            when, _, action = heapq.heappop(self._events)
            self.clock.advance_to(when)
            self.count += 1
            action()
        return True


class DeadlineTimer:
    """A timer that calls `callback` when its deadline is reached. The deadline may move in both directions: if it moved
    to a later time, `callback` is still called at the earlier one, and must check itself what is due."""

    def __init__(self, heap: EventQueue, due: Callable[[], float], callback: Callable[[], None]) -> None:
        """due: returns the deadline, the latest time at which `callback` must be called."""
        self._heap, self._due, self._callback = heap, due, callback
        self._scheduled_for = math.inf

    def set(self) -> None:
        """Schedules the timer anew. Must be called whenever the result of `due` may have changed."""
        due = max(self._due(), self._heap.now)
        if due < self._scheduled_for:
            self._scheduled_for = due
            self._heap.at(due, lambda: self._on_time(due))

    def _on_time(self, due: float) -> None:
        if due == self._scheduled_for:
            self._scheduled_for = math.inf
            self._callback()
