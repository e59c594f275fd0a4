"""Virtual time: a heap of events, and alarms whose time may change."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from decentnode.clock import VirtualClock


class EventHeap:
    """What is to happen, in the order of its times; of two at one time, the one that was added first."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.count = 0
        """Events so far."""
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
        """Whether `over` came to hold by the time `until`; it is asked after every event."""
        while not over():
            if not self._events or self._events[0][0] > until:
                return False
            when, _, action = heapq.heappop(self._events)
            self.clock.advance_to(when)
            self.count += 1
            action()
        return True


class Alarm:
    """Rings when something is due, and not before; what is due may come earlier or later than it was said last."""

    def __init__(self, heap: EventHeap, due: Callable[[], float], ring: Callable[[], None]) -> None:
        """due: when `ring` has to be called at the latest."""
        self._heap, self._due, self._ring = heap, due, ring
        self._armed = math.inf

    def set(self) -> None:
        """To be called whenever `due` may have changed."""
        due = max(self._due(), self._heap.now)
        if due < self._armed:
            self._armed = due
            self._heap.at(due, lambda: self._fire(due))

    def _fire(self, due: float) -> None:
        if due == self._armed:
            self._armed = math.inf
            self._ring()
