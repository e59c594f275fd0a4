"""Images that are read from their files: those of the next batches while a node computes."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from decentnode.samples import Crop, ImageFiles, Reading, Samples

AHEAD_BATCHES = 2
"""Batches of a node that are read ahead, or as many more as give each thread two images."""
AHEAD_BYTES = 1 << 28
"""Of all batches that nodes of a process read ahead; beyond it a batch is read when it is taken."""

_all: weakref.WeakSet[ReadAhead] = weakref.WeakSet()
_lock = threading.Lock()


class ReadAhead:
    """Reads the batches of one node. What it gives does not depend on what it has read ahead."""

    def __init__(
        self, images: ImageFiles, crop: Callable[[np.ndarray, int], Crop | None] = lambda *_: None
    ) -> None:
        """crop: called with the samples of a batch and the epoch; as `ImageFiles.begin` has it."""
        self._images, self._crop = images, crop
        self._ahead: deque[tuple[np.ndarray, int, Reading]] = deque()
        with _lock:
            _all.add(self)

    @property
    def bytes(self) -> int:
        """Of the batches that are read ahead."""
        return sum(self._bytes(samples) for samples, *_ in [*self._ahead])

    def _bytes(self, samples: np.ndarray) -> int:
        return len(samples) * math.prod(self._images.input_shape)

    def take(self, samples: np.ndarray, epoch: int = 0) -> Samples:
        """Returns the batch of these samples [B], blocking until it is read. Raises SampleFailed."""
        while self._ahead:
            known, of_epoch, reading = self._ahead.popleft()
            if of_epoch == epoch and np.array_equal(known, samples):
                return reading.result()
            reading.cancel()  # another place in the order: resumed, or dealt anew
        return self._images.begin(samples, self._crop(samples, epoch)).result()

    def begin(self, upcoming: Iterable[tuple[np.ndarray, int]]) -> None:
        """Begin to read the batches that will be taken next, as far as there is room; not blocking.

        upcoming: samples and epoch of each, in order, without an end or few.
        """
        for place, (samples, epoch) in enumerate(upcoming):
            most = max(AHEAD_BATCHES, 2 * self._images.threads // max(1, len(samples)))
            if place >= most or not len(samples):
                return
            if place < len(self._ahead):
                continue
            with _lock:
                others = [*_all]
            if sum(each.bytes for each in others) + self._bytes(samples) > AHEAD_BYTES:
                return
            self._ahead.append((samples, epoch, self._images.begin(samples, self._crop(samples, epoch))))
