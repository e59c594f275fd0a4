"""How many local steps fit into the time of a round, by the speed that a node has measured of its own."""

from __future__ import annotations


class Pace:
    """Counts steps and seconds, and says how many steps the next round has."""

    def __init__(self, seconds: float) -> None:
        """seconds: that the local steps of a round are to take."""
        self._seconds = seconds
        self._per_step: float | None = None
        self._last = 0

    def steps(self) -> int:
        """Returns the steps of the next round: 1 at first, then as many as fit, and at most twice as many as in the
        last one, because first steps take long for other reasons."""
        if self._per_step is None:
            return 1
        return max(1, min(int(self._seconds / max(self._per_step, 1e-9)), 2 * self._last))

    def took(self, steps: int, seconds: float) -> None:
        """So many steps took so long: half of what is known follows from the last round."""
        each = seconds / steps
        self._per_step = each if self._per_step is None or self._last == 1 else (self._per_step + each) / 2
        self._last = steps
