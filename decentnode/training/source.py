"""Samples as tensors on the model's device, normalized when a batch is taken."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

from decentnode.samples import AnySamples, LazySamples, Rows, Samples

CONVERT_ONCE_BYTES = 1 << 20
"""Inputs that take up to this as float32 are converted at once; larger 8-bit ones stay as they are (a quarter of the
memory, or a mapped file that all nodes share) and a batch costs a few microseconds more."""
NARROW = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}
"""Whole numbers that torch cannot index, and those that hold them."""


_sources: weakref.WeakValueDictionary[tuple[object, ...], Source] = weakref.WeakValueDictionary()
"""By the arrays (their addresses, which the source keeps alive), the normalization and the device."""


def source_of(samples: AnySamples, device: torch.device) -> Source:
    """Returns the source of samples that nobody changes: the same one for the same arrays, so that all nodes of a
    process hold the test samples once."""
    if not isinstance(samples, Samples):
        return Source(samples, device)
    key = (id(samples.inputs), id(samples.targets), samples.scale, samples.offset, samples.ids, str(device))
    found = _sources.get(key)
    if found is None:
        found = _sources[key] = Source(samples, device)
        found.kept = samples  # so that no other array gets its address while it is known
    return found


class Source:
    """The samples of a split; any of them as a batch of tensors."""

    def __init__(self, samples: AnySamples, device: torch.device) -> None:
        self._device = device
        self.zero = 0.0
        """What the normalization makes of 0; of samples that are made when they are taken, 0."""
        self.kept: AnySamples | None = None
        """Set by `source_of`."""
        self._lazy = samples if isinstance(samples, LazySamples) else None
        self._length = len(samples)
        if isinstance(samples, Samples):
            self._open(samples)

    def _open(self, samples: Samples) -> None:
        self._targets = _Array(samples.targets, self._device)
        self._inputs = _Array(samples.inputs, self._device)
        self._scale, self._offset, self._ids = samples.scale, samples.offset, samples.ids
        self.zero = samples.offset
        if not self._ids and isinstance(samples.inputs, np.ndarray) and samples.inputs.size * 4 <= CONVERT_ONCE_BYTES:
            self._inputs.tensor = self._normalize(self._inputs.tensor)
            self._scale, self._offset = 1.0, 0.0

    def __len__(self) -> int:
        return self._length

    @property
    def sample_elements(self) -> int:
        """How many numbers the inputs of one sample are, at most."""
        if self._lazy is not None:
            if not self._length:
                return 1
            return max(1, math.prod(self._lazy.fetch(np.zeros(1, np.int64)).inputs.shape))
        return max(1, self._inputs.elements)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Model-ready copies of the samples at `indices` [M] int64: inputs [M, *input_shape] float32, or int64 where
        they are ids, and targets [M, *target_shape] float32 or int64. Rows are padded to the longest of them."""
        if self._lazy is not None:
            made = Source(self._lazy.fetch(indices.cpu().numpy()), self._device)
            return made.take(torch.arange(len(indices), device=self._device))
        targets = self._targets.take(indices)
        kind = torch.float32 if targets.is_floating_point() else torch.int64
        return self._normalize(self._inputs.take(indices)), targets.to(kind)

    def _normalize(self, inputs: Tensor) -> Tensor:
        if self._ids:
            return inputs.to(torch.int64)
        ready = inputs.to(torch.float32)
        if self._scale != 1.0 or self._offset != 0.0:
            ready = ready * self._scale if ready is inputs else ready.mul_(self._scale)
            ready.add_(self._offset)
        return ready


class _Array:
    """An array or rows, of which a batch is taken."""

    def __init__(self, values: np.ndarray | Rows, device: torch.device) -> None:
        array = values.values if isinstance(values, Rows) else values
        array = array.astype(NARROW.get(array.dtype, array.dtype), copy=False)
        self.tensor = torch.from_numpy(array).to(device)
        self.elements = math.prod(values.shape[1:])
        self._rows = values if isinstance(values, Rows) else None
        if self._rows is not None:
            self._starts = torch.from_numpy(np.asarray(self._rows.starts, np.int64)).to(device)
            fixed = isinstance(self._rows.lengths, int)
            self._lengths = None if fixed else torch.from_numpy(np.asarray(self._rows.lengths, np.int64)).to(device)

    def take(self, indices: Tensor) -> Tensor:
        if self._rows is None:
            return self.tensor.index_select(0, indices)
        starts = self._starts.index_select(0, indices)
        if self._lengths is None:
            return self.tensor[starts[:, None] + torch.arange(self._rows.longest, device=starts.device)]
        lengths = self._lengths.index_select(0, indices)
        width = torch.arange(int(lengths.max()) if len(lengths) else 0, device=starts.device)
        there = width < lengths[:, None]
        found = self.tensor[torch.where(there, starts[:, None] + width, 0)]
        if not found.is_floating_point():
            found = found.to(torch.int64)  # the padding of targets is negative
        return found.where(there.reshape(*there.shape, *[1] * (found.ndim - 2)), self._rows.padding)
