"""Time-outs that a process does not spend while it is suspended. No clock."""

from __future__ import annotations

GAP_SECONDS = 1.0
"""What counts at most of the time between two looks."""


class RunningTime:
    """How long something may still take. Of the time between two looks GAP_SECONDS count at most: a process that was
    suspended for longer had no chance to do what it waits for, and gets one when it goes on. Not thread-safe."""

    def __init__(self, seconds: float, now: float) -> None:
        """now: seconds of any monotonic clock."""
        self.seconds = seconds
        """What is left."""
        self._looked = now

    def over(self, now: float) -> bool:
        """Look whether the time is over; to be called several times within GAP_SECONDS."""
        self.seconds -= min(now - self._looked, GAP_SECONDS)
        self._looked = now
        return self.seconds <= 0
