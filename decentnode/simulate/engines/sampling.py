"""Draws the samples of the next step of all nodes at once, exactly as each node's own sampler would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decentnode.training.sampler import Sampler


class StackedSampler:
    """Takes the place of the samplers of all nodes. It uses their orders, and leaves the samplers themselves
    unchanged."""

    def __init__(self, samplers: Sequence[Sampler], members: Sequence[np.ndarray]) -> None:
        """members: for each node, the indices [M] of its training samples among those of all nodes."""
        self._samplers = samplers
        self._members = members
        self.batch = samplers[0].batch
        self._epochs = np.array([each.epoch for each in samplers])
        self._starts = np.cumsum([0, *(each.num_samples for each in samplers)])[:-1]
        self._stops = self._starts + np.array([each.usable for each in samplers])
        self._cursors = self._starts + np.array([each.cursor for each in samplers])
        self._order = np.empty(sum(each.num_samples for each in samplers), np.int64)
        """The orders of all nodes' present epochs, concatenated, as indices among all samples."""
        self._offsets = np.arange(self.batch)
        for node in range(len(samplers)):
            self._start_epoch(node)

    def _start_epoch(self, node: int) -> None:
        start, sampler = self._starts[node], self._samplers[node]
        order = sampler.order_of(int(self._epochs[node]))
        self._order[start : start + sampler.num_samples] = self._members[node][order]

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples of the next step: indices [N, batch] int64, and the number of valid ones in each row [N];
        after those, a row repeats a sample."""
        for node in np.flatnonzero(self._cursors >= self._stops).tolist():
            self._epochs[node] += 1
            self._cursors[node] = self._starts[node]
            self._start_epoch(node)
        counts = np.minimum(self._stops - self._cursors, self.batch)
        at = self._cursors[:, None] + np.minimum(self._offsets, counts[:, None] - 1)
        self._cursors += counts
        return self._order[at], counts
