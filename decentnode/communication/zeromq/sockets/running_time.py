"""Time-outs that do not run while the process is suspended. No clock."""

from __future__ import annotations

GAP_SECONDS = 1.0
"""Most seconds that count between two checks."""


class RunningTime:
    """A time-out of which at most GAP_SECONDS pass between two checks. Not thread-safe.

    A process that was suspended for longer had no chance to finish what it waits for, and gets one after it resumes.
    """

    def __init__(self, seconds: float, now: float) -> None:
        """now: seconds of any monotonic clock."""
        self.seconds = seconds
        """The remaining time."""
        self._looked = now

    def over(self, now: float) -> bool:
        """Returns whether the time is over. To be called several times within GAP_SECONDS."""
        self.seconds -= min(now - self._looked, GAP_SECONDS)
        self._looked = now
        return self.seconds <= 0
