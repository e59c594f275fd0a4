"""Computes how many local steps fit into the time of a round, from a node's own measured speed."""

from __future__ import annotations


class Pace:
    """Measures the seconds per step, and chooses the number of steps of the next round."""

    def __init__(self, seconds: float) -> None:
        """seconds: the time that the local steps of a round are to take."""
        self._seconds = seconds
        self._seconds_per_step: float | None = None
        self._last_steps = 0

    def steps(self) -> int:
        """Returns the number of steps of the next round: 1 at first, then as many as fit, but at most twice as many as
        in the last round, because the measurement of the first steps includes start-up costs."""
        if self._seconds_per_step is None:
            return 1
        return max(1, min(int(self._seconds / max(self._seconds_per_step, 1e-9)), 2 * self._last_steps))

    def record(self, steps: int, seconds: float) -> None:
        """Record that `steps` steps took `seconds`. The estimate is averaged with the previous one, except after a
        round of one step, whose measurement is replaced."""
        each = seconds / steps
        if self._seconds_per_step is not None and self._last_steps != 1:
            each = (self._seconds_per_step + each) / 2
        self._seconds_per_step = each
        self._last_steps = steps
