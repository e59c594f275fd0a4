"""The only module that reads the time and sleeps. All others call it, so that whole nodes can run on virtual time.

Call the functions through the module (`clock.now()`), never by a name bound at import, because `use` replaces the
clock. Waits that the operating system ends (sockets, conditions, processes) take a timeout in seconds instead.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar


class Clock(abc.ABC):
    """A source of time."""

    @abc.abstractmethod
    def now(self) -> float:
        """Returns seconds since an arbitrary moment. Never goes back. Used for deadlines and durations."""

    @abc.abstractmethod
    def wall(self) -> float:
        """Returns seconds since 1970 (UTC), for comparison with file times and other processes. It may jump."""

    @abc.abstractmethod
    def recorded(self) -> float:
        """Returns seconds since 1970 (UTC), for records. Never goes back."""

    @abc.abstractmethod
    def sleep(self, seconds: float) -> None:
        """Blocks for `seconds` >= 0."""


class RealClock(Clock):
    """The machine's clock."""

    _since_boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    """Unlike CLOCK_MONOTONIC, CLOCK_BOOTTIME also counts the time in which the machine is suspended."""
    _boot: float | None = None
    """The time of day at which the machine was booted, as it was when this process recorded something first."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def recorded(self) -> float:
        since_boot = time.clock_gettime(self._since_boot)
        if self._boot is None:
            self._boot = time.time() - since_boot
        return self._boot + since_boot

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock(Clock):
    """A clock that advances only by `sleep` and `advance_to`. Not thread-safe."""

    def __init__(self, wall: float = 0.0) -> None:
        """wall: seconds since 1970 at the start."""
        self._now, self._began = 0.0, wall

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._began + self._now

    def recorded(self) -> float:
        return self.wall()

    def sleep(self, seconds: float) -> None:
        """Advances the clock by `seconds` and returns immediately."""
        self.advance_to(self._now + seconds)

    def advance_to(self, now: float) -> None:
        """Sets the clock to `now`. Raises ValueError if that is in the past."""
        if now < self._now:
            raise ValueError(f"time must not go back from {self._now} to {now}")
        self._now = now


C = TypeVar("C", bound=Clock)
_clock: Clock = RealClock()
now: Callable[[], float] = time.monotonic
"""Returns seconds since an arbitrary moment. Never goes back. This is the clock's own function, without a wrapper,
because every message and every wait calls it."""


jumps: list[Callable[[], float]] = []
"""Functions whose results are added to the time of day: the seconds by which an injected fault has made it jump
(node/faults.py)."""


def wall() -> float:
    """Returns seconds since 1970 (UTC)."""
    return _clock.wall() + sum(jump() for jump in jumps) if jumps else _clock.wall()


def recorded() -> float:
    """Returns seconds since 1970 (UTC), for records: the time of day at this process's first record plus the time since
    then. So a clock that is set during a run changes neither the order of records nor the time between them."""
    return _clock.recorded()


def sleep(seconds: float) -> None:
    """Blocks for `seconds`."""
    _clock.sleep(seconds)


def cpu() -> float:
    """Returns the CPU seconds that this process has used: a real cost, also on a virtual clock."""
    return time.process_time()


def thread_cpu() -> float:
    """Returns the CPU seconds that the calling thread has used."""
    return time.thread_time()


@contextlib.contextmanager
def use(clock: C) -> Iterator[C]:
    """Returns a context manager that makes `clock` the clock of the process."""
    global _clock, now
    before = _clock, now
    _clock, now = clock, clock.now
    try:
        yield clock
    finally:
        _clock, now = before
