"""Samples as tensors on the model's device, normalized when a batch is taken."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from decentnode.samples import AnySamples, ImageFiles, LazySamples, Rows, Samples
from decentnode.tensors import moved
from decentnode.training.read_ahead import ReadAhead

CONVERT_ONCE_BYTES = 1 << 20
"""Inputs that take up to this as float32 are converted at once; larger 8-bit ones stay as they are (a quarter of the
memory, or a mapped file that all nodes share) and a batch costs a few microseconds more."""
SIGNED = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}
"""Whole numbers that torch cannot index, and those whose bits they are taken for: a mapped file is not copied."""
MASK = {np.dtype(np.uint16): (1 << 16) - 1, np.dtype(np.uint32): (1 << 32) - 1}
"""What of these numbers' bits, as int64, is the value; values of 64 bits are below 2^63."""


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

    def __init__(
        self, samples: AnySamples, device: torch.device, move: Callable[[Tensor, torch.device], Tensor] = Tensor.to
    ) -> None:
        """move: brings the arrays to the device."""
        self._device, self._move = device, move
        self.zero: float | Tensor = 0.0
        """What the normalization makes of 0, [C, 1, 1] of each channel; of samples that a Dataset makes, 0."""
        self.images = samples if isinstance(samples, ImageFiles) else None
        """The samples where they are read from their files."""
        self.kept: AnySamples | None = None
        """Set by `source_of`."""
        self._lazy = samples if isinstance(samples, LazySamples) else None
        self._length = len(samples)
        if isinstance(samples, Samples):
            self._open(samples)
        if self.images is not None:
            self.zero = _by_channel(self.images.offset, device)

    def _open(self, samples: Samples) -> None:
        self._targets = _Array(samples.targets, self._device, self._move)
        self._inputs = _Array(samples.inputs, self._device, self._move)
        self._scale, self._offset, self._ids = samples.scale, samples.offset, samples.ids
        self.zero = _by_channel(samples.offset, self._device)
        if not self._ids and isinstance(samples.inputs, np.ndarray) and samples.inputs.size * 4 <= CONVERT_ONCE_BYTES:
            self._inputs = self._inputs.holding(self._normalize(self._inputs.read(self._inputs.tensor)))
            self._scale, self._offset = 1.0, 0.0

    @classmethod
    def joined(cls, sources: Sequence[Source]) -> Source | None:
        """Returns a source with the samples of all `sources` behind each other. Their own arrays are views of it from
        then on, so that nothing is held twice; of rows, whose sequence is one for all, the places are. None where they
        cannot be joined: samples that are made when they are taken, or rows of several sequences."""
        first = sources[0]
        if any(each._lazy is not None or each._way != first._way for each in sources):
            return None
        joined = copy.copy(first)
        joined.kept, joined._length = None, sum(map(len, sources))
        for name in ("_inputs", "_targets"):
            arrays = [getattr(each, name) for each in sources]
            if arrays[0].rows is not None:
                setattr(joined, name, arrays[0].with_rows([each.rows for each in arrays]))
                continue
            whole = torch.cat([each.tensor for each in arrays])
            setattr(joined, name, arrays[0].holding(whole))
            start = 0
            for array in arrays:
                stop = start + len(array.tensor)
                array.tensor, start = whole[start:stop], stop
        return joined

    @property
    def _way(self) -> tuple[object, ...]:
        """What must be alike of samples that are taken together."""
        return self._scale, self._offset, self._ids, self._inputs.way, self._targets.way

    def __len__(self) -> int:
        return self._length

    @property
    def unequal(self) -> bool:
        """Whether samples are rows of unequal length: then nearly every batch has a shape of its own."""
        return self._lazy is None and self._inputs.unequal

    @property
    def sample_elements(self) -> int:
        """How many numbers the inputs of one sample are, at most."""
        if self.images is not None:
            return math.prod(self.images.input_shape)
        if self._lazy is not None:
            if not self._length:
                return 1
            return max(1, math.prod(self._lazy.fetch(np.zeros(1, np.int64)).inputs.shape))
        return max(1, self._inputs.elements)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Model-ready copies of the samples at `indices` [M] int64, which are on the CPU: inputs [M, *input_shape]
        float32, or int64 where they are ids, and targets [M, *target_shape] float32 or int64. Rows are padded to the
        longest of them. Not blocking on a GPU."""
        if self._lazy is not None:
            return self.ready(self._lazy.fetch(indices.numpy()))
        targets = self._targets.take(indices)
        kind = torch.float32 if targets.is_floating_point() else torch.int64
        return self._normalize(self._inputs.take(indices)), targets.to(kind)

    def ready(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """As `take`, of samples that have been made."""
        return Source(samples, self._device, moved).take(torch.arange(len(samples)))

    def batches(self, chunks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the samples at each of `chunks` that is not empty, as `take` gives them. Files are read ahead."""
        chunks = [chunk for chunk in chunks if len(chunk)]
        if self.images is None:
            yield from map(self.take, chunks)
            return
        reader = ReadAhead(self.images)
        for place, chunk in enumerate(chunks):
            samples = reader.take(chunk.numpy())
            reader.begin((each.numpy(), 0) for each in chunks[place + 1 :])
            yield self.ready(samples)

    def _normalize(self, inputs: Tensor) -> Tensor:
        if self._ids:
            return inputs.to(torch.int64)
        ready = inputs.to(torch.float32)
        if self._scale != 1.0 or self._offset != 0.0:
            scale, offset = (_by_channel(each, self._device) for each in (self._scale, self._offset))
            ready = ready * scale if ready is inputs else ready.mul_(scale)
            ready.add_(offset)
        return ready


def _by_channel(value: float | tuple[float, ...], device: torch.device) -> float | Tensor:
    """What images [B, C, H, W] are multiplied by or added to."""
    return moved(torch.tensor(value)[:, None, None], device) if isinstance(value, tuple) else value


class _Sequence:
    """A sequence on a device, and the array that it was made from, whose address nothing else gets meanwhile."""

    def __init__(self, array: np.ndarray, tensor: Tensor) -> None:
        self._array, self.tensor = array, tensor


_sequences: weakref.WeakValueDictionary[tuple[object, ...], _Sequence] = weakref.WeakValueDictionary()


def _sequence_of(
    array: np.ndarray, device: torch.device, move: Callable[[Tensor, torch.device], Tensor]
) -> _Sequence:
    """Returns what rows are taken from: the same for the same array, so that all nodes of a process hold it once."""
    key = (array.ctypes.data, array.shape, array.dtype.str, str(device))
    found = _sequences.get(key)
    if found is None:
        found = _sequences[key] = _Sequence(array, move(torch.from_numpy(array), device))
    return found


class _Array:
    """An array or rows, of which a batch is taken."""

    def __init__(
        self, values: np.ndarray | Rows, device: torch.device, move: Callable[[Tensor, torch.device], Tensor]
    ) -> None:
        array = values.values if isinstance(values, Rows) else values
        self.mask = MASK.get(array.dtype)
        """Where it is set, `tensor` holds the bits of numbers without a sign."""
        array = array.view(SIGNED.get(array.dtype, array.dtype))
        self._device = device
        self.elements = math.prod(values.shape[1:])
        self.rows = values if isinstance(values, Rows) else None
        self._sequence = _sequence_of(array, device, move) if self.rows is not None else None
        self.tensor = move(torch.from_numpy(array), device) if self._sequence is None else self._sequence.tensor
        if self.rows is not None:
            self._place(self.rows)

    def _place(self, rows: Rows) -> None:
        self.rows, self.elements = rows, math.prod(rows.shape[1:])
        self._starts = torch.from_numpy(np.asarray(rows.starts, np.int64))
        fixed = isinstance(rows.lengths, int)
        self._lengths = None if fixed else torch.from_numpy(np.asarray(rows.lengths, np.int64))

    @property
    def way(self) -> tuple[object, ...]:
        """What must be alike of samples that are taken together."""
        kind = self.tensor.dtype, self.mask, self.tensor.shape[1:]
        if self.rows is None:
            return kind
        return *kind, self._sequence, self.rows.padding, self.rows.lengths if self._lengths is None else None

    def with_rows(self, every: Sequence[Rows]) -> _Array:
        """Returns the rows of all `every` behind each other, whose `way` is this one's."""
        found, first = copy.copy(self), every[0]
        starts, lengths = (np.concatenate([np.asarray(value, np.int64) for value in values]) for values in (
            [each.starts for each in every], [np.atleast_1d(each.lengths) for each in every]))  # fmt: skip
        found._place(replace(first, starts=starts, lengths=first.lengths if self._lengths is None else lengths))
        return found

    @property
    def unequal(self) -> bool:
        """Whether rows need not be of one length."""
        return self.rows is not None and self._lengths is not None

    def holding(self, tensor: Tensor) -> _Array:
        """Returns another array with the values of `tensor`."""
        found = copy.copy(self)
        found.tensor = tensor
        if tensor.dtype != self.tensor.dtype:
            found.mask = None
        return found

    def read(self, taken: Tensor) -> Tensor:
        """Returns the values of what was taken of `tensor`."""
        return taken if self.mask is None else taken.to(torch.int64) & self.mask

    def take(self, indices: Tensor) -> Tensor:
        """As `Source.take`, of this array or these rows as they are."""
        if self.rows is None:
            return self.read(self.tensor.index_select(0, moved(indices, self._device)))
        starts = moved(self._starts.index_select(0, indices), self._device)
        if self._lengths is None:
            return self.read(self.tensor[starts[:, None] + torch.arange(self.rows.longest, device=self._device)])
        lengths = self._lengths.index_select(0, indices)
        width = torch.arange(int(lengths.max()) if len(lengths) else 0, device=self._device)
        there = width < moved(lengths, self._device)[:, None]
        found = self.read(self.tensor[torch.where(there, starts[:, None] + width, 0)])
        if not found.is_floating_point():
            found = found.to(torch.int64)  # the padding of targets is negative
        return found.where(there.reshape(*there.shape, *[1] * (found.ndim - 2)), self.rows.padding)
