"""Reads images from their files, those of the next batches while the node computes."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from decentnode.samples import Crop, ImageFiles, Reading, Samples

AHEAD_BATCHES = 2
"""The number of batches that a node reads ahead; more if batches are so small that a thread would have fewer than two
images."""
AHEAD_BYTES = 1 << 28
"""The limit, in bytes, for all batches that the nodes of a process read ahead; beyond it, a batch is only read when it
is taken."""

_all: weakref.WeakSet[ReadAhead] = weakref.WeakSet()
_lock = threading.Lock()


class ReadAhead:
    """Reads the batches of one node. The results do not depend on what was read ahead."""

    def __init__(
        self, images: ImageFiles, crop: Callable[[np.ndarray, int], Crop | None] = lambda *_: None
    ) -> None:
        """crop: called with the samples of a batch and the epoch; returns the `crop` argument of `ImageFiles.begin`."""
        self._images, self._crop = images, crop
        self._ahead: deque[tuple[np.ndarray, int, Reading]] = deque()
        with _lock:
            _all.add(self)

    @property
    def bytes(self) -> int:
        """The size in bytes of the batches that are being read ahead."""
        return sum(self._bytes(samples) for samples, *_ in [*self._ahead])

    def _bytes(self, samples: np.ndarray) -> int:
        return len(samples) * math.prod(self._images.input_shape)

    def take(self, samples: np.ndarray, epoch: int = 0) -> Samples:
        """Returns the batch of these samples [B]. Blocks until it is read. Raises SampleFailed."""
        while self._ahead:
            known, of_epoch, reading = self._ahead.popleft()
            if of_epoch == epoch and np.array_equal(known, samples):
                return reading.result()
            reading.cancel()  # the position in the order has changed: the run was resumed, or samples were dealt again
        return self._images.begin(samples, self._crop(samples, epoch)).result()

    def begin(self, upcoming: Iterable[tuple[np.ndarray, int]]) -> None:
        """Begin to read the batches that will be taken next, up to the limits; not blocking.

        upcoming: the samples and the epoch of each batch in order; may be infinite.
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
