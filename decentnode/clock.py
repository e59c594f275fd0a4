"""The only place that reads time and sleeps; everything else asks here, so that whole nodes can run on virtual time.

Call the functions through the module (`clock.now()`), never by a name bound at import: `use` puts another clock in
their place. Waits that an operating system ends (sockets, conditions, processes) take a timeout in seconds instead.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar


class Clock(abc.ABC):
    """Where the seconds come from."""

    @abc.abstractmethod
    def now(self) -> float:
        """Returns seconds since an arbitrary moment; never goes back. Deadlines and durations are made of it."""

    @abc.abstractmethod
    def wall(self) -> float:
        """Returns seconds since 1970 (UTC), for records and for comparison with files' times. It may jump."""

    @abc.abstractmethod
    def sleep(self, seconds: float) -> None:
        """Blocking for `seconds` >= 0."""


class RealClock(Clock):
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock(Clock):
    """A clock that moves when it is told to. Not for several threads."""

    def __init__(self, wall: float = 0.0) -> None:
        """wall: seconds since 1970 at the start."""
        self._now, self._began = 0.0, wall

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._began + self._now

    def sleep(self, seconds: float) -> None:
        """Returns at once, `seconds` later."""
        self.advance_to(self._now + seconds)

    def advance_to(self, now: float) -> None:
        """Raises ValueError where that is in the past."""
        if now < self._now:
            raise ValueError(f"time must not go back from {self._now} to {now}")
        self._now = now


C = TypeVar("C", bound=Clock)
_clock: Clock = RealClock()
now: Callable[[], float] = time.monotonic
"""Returns seconds since an arbitrary moment; never goes back. It is the clock's own function, without a call in
between, as every message and wait asks it."""


jumps: list[Callable[[], float]] = []
"""What add to the time of day: by how many seconds a fault made it jump (node/faults.py)."""


def wall() -> float:
    """Returns seconds since 1970 (UTC)."""
    return _clock.wall() + sum(jump() for jump in jumps) if jumps else _clock.wall()


def sleep(seconds: float) -> None:
    """Blocking for `seconds`."""
    _clock.sleep(seconds)


def cpu() -> float:
    """Returns the seconds of CPU that this process has used: a cost, which no virtual clock changes."""
    return time.process_time()


def thread_cpu() -> float:
    """Returns the seconds of CPU that the calling thread has used."""
    return time.thread_time()


@contextlib.contextmanager
def use(clock: C) -> Iterator[C]:
    """Within it, this clock is the process's."""
    global _clock, now
    before = _clock, now
    _clock, now = clock, clock.now
    try:
        yield clock
    finally:
        _clock, now = before
