"""The samples of the next steps of all nodes at once, as each node's own sampler would give them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decentnode.training.sampler import Sampler


class StackedSampler:
    """Takes the places of all samplers together. Orders are those of the samplers, which themselves stay as they are.
    """

    def __init__(self, samplers: Sequence[Sampler], members: Sequence[np.ndarray]) -> None:
        """members: per node the numbers [M] of its training samples among those of all nodes."""
        self._samplers = samplers
        self._members = members
        self.batch = samplers[0].batch
        self._epochs = np.array([each.epoch for each in samplers])
        self._starts = np.cumsum([0, *(each.num_samples for each in samplers)])[:-1]
        self._stops = self._starts + np.array([each.usable for each in samplers])
        self._cursors = self._starts + np.array([each.cursor for each in samplers])
        self._order = np.empty(sum(each.num_samples for each in samplers), np.int64)
        """Behind each other the orders of all nodes' present epochs, in numbers among all samples."""
        self._places = np.arange(self.batch)
        for node in range(len(samplers)):
            self._deal(node)

    def _deal(self, node: int) -> None:
        start, sampler = self._starts[node], self._samplers[node]
        order = sampler.order_of(int(self._epochs[node]))
        self._order[start : start + sampler.num_samples] = self._members[node][order]

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples of the next step: numbers [N, batch] int64, and how many of each row count [N]; behind
        those, rows repeat a sample."""
        for node in np.flatnonzero(self._cursors >= self._stops).tolist():
            self._epochs[node] += 1
            self._cursors[node] = self._starts[node]
            self._deal(node)
        counts = np.minimum(self._stops - self._cursors, self.batch)
        at = self._cursors[:, None] + np.minimum(self._places, counts[:, None] - 1)
        self._cursors += counts
        return self._order[at], counts
