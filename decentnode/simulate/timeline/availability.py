"""When nodes are available: intervals that repeat, and the duration of work that is done only within them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decentnode import rng
from decentnode.errors import DataError
from decentnode.experiment.virtual_time import ChurnConfig

CYCLES = 64
"""Number of pairs of times up and away that are drawn for a node before they repeat."""

Intervals = Sequence[tuple[float, float]]
"""Begin and end of each interval in which a node is available, ascending and disjoint."""


class Availability:
    """The times at which each of N nodes is available; each node's times repeat after its period."""

    def __init__(self, intervals: Sequence[Intervals], periods: Sequence[float]) -> None:
        """Raises DataError for a node that is never available."""
        self._periods = np.array(periods, float)
        begins, sums, ends, owner = [], [], [], []
        self._up_seconds = np.zeros(len(intervals))
        """[N] seconds of a period in which the node is available."""
        for uid, (intervals_of_node, period) in enumerate(zip(intervals, periods, strict=True)):
            spans = [(max(0.0, a), min(b, period)) for a, b in intervals_of_node if b > a and a < period]
            if not spans:
                raise DataError(f"availability: node {uid} is never available")
            for a, b in spans:
                begins.append(a)
                ends.append(b)
                sums.append(self._up_seconds[uid])
                owner.append(uid)
                self._up_seconds[uid] += b - a
        self._begin, self._end = np.array(begins), np.array(ends)
        self._before = np.array(sums)
        """Seconds of the period in which the node was available before each interval."""
        owners = np.array(owner)
        self._first = np.searchsorted(owners, np.arange(len(intervals)))
        # One sorted array for all nodes: an offset puts each node's entries into a range of their own.
        self._offset = float(self._periods.max()) + 1.0
        self._keys = self._begin + self._offset * owners
        self._sums = self._before + self._offset * owners

    def _at(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (index of the last interval that has begun, or of the first if none has; the time within the period;
        the number of the period), each [N]."""
        nodes = np.arange(len(self._periods))
        cycle = np.floor(times / self._periods)
        within = times - cycle * self._periods
        index = np.searchsorted(self._keys, within + self._offset * nodes, "right") - 1
        return np.maximum(index, self._first), within, cycle

    def present(self, times: np.ndarray) -> np.ndarray:
        """Returns whether each node is available at its time [N]."""
        index, within, _ = self._at(times)
        return (within >= self._begin[index]) & (within < self._end[index])

    def finish_work(self, times: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Returns when each node has been available for `seconds` [N] since `times` [N]."""
        index, within, cycle = self._at(times)
        elapsed = np.clip(within - self._begin[index], 0.0, self._end[index] - self._begin[index])
        total = cycle * self._up_seconds + self._before[index] + elapsed + seconds
        # Work that ends exactly with an interval ends then, and not when the next one begins.
        cycle = np.maximum(np.ceil(total / self._up_seconds - 1e-12) - 1, 0.0)
        rest = total - cycle * self._up_seconds
        nodes = np.arange(len(self._periods))
        index = np.searchsorted(self._sums, rest + self._offset * nodes, "left") - 1
        index = np.maximum(index, self._first)
        ends = cycle * self._periods + self._begin[index] + rest - self._before[index]
        return np.where(seconds > 0, np.maximum(ends, times), times)

    def next_available(self, times: np.ndarray) -> np.ndarray:
        """Returns when each node is next available: at its time [N] if it is available then."""
        index, within, cycle = self._at(times)
        later = index + (within >= self._end[index])
        past = np.append(self._first[1:], len(self._begin))  # the index after each node's last interval
        again = later >= past
        begin = self._begin[np.where(again, self._first, later)]
        return np.where(self.present(times), times, (cycle + again) * self._periods + begin)


def draw_availability(config: ChurnConfig, nodes: int, seed: int) -> Availability:
    """Returns availability with exponentially distributed times up and away. Every node starts at a random point of
    them."""
    intervals, periods = [], []
    for uid in range(nodes):
        draws = rng.stream(seed, uid, "churn")
        up, away = draws.exponential(config.up_seconds, CYCLES), draws.exponential(config.away_seconds, CYCLES)
        ends = np.cumsum(up + away)
        period = float(ends[-1])
        begins = ends - up - away + draws.uniform(0, period)
        spans = sorted((float(a % period), float(a % period + u)) for a, u in zip(begins, up, strict=True))
        if spans[-1][1] > period:  # the last interval wraps around to the beginning
            spans = [(0.0, spans[-1][1] - period), *spans[:-1], (spans[-1][0], period)]
        intervals.append(spans)
        periods.append(period)
    return Availability(intervals, periods)
