"""Provides samples as batches of tensors on the model's device, normalized when a batch is taken."""

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
"""Inputs of up to this size as float32 are converted once. Larger inputs keep their dtype (8-bit ones take a quarter of
the memory, or are in a mapped file that all nodes share), and a batch takes a few microseconds more."""
SIGNED_TWINS = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}
"""Unsigned dtypes that torch cannot index -> the signed dtype as which their bits are interpreted, so that a mapped
file is not copied."""
VALUE_MASKS = {np.dtype(np.uint16): (1 << 16) - 1, np.dtype(np.uint32): (1 << 32) - 1}
"""Unsigned dtype -> the bits of an int64 that are the value; 64-bit values need no mask, as they are below 2^63."""


_sources: weakref.WeakValueDictionary[tuple[object, ...], Source] = weakref.WeakValueDictionary()
"""The sources of `source_of`, by the arrays (their ids, valid as the source keeps the arrays alive), the normalization
and the device."""


def source_of(samples: AnySamples, device: torch.device) -> Source:
    """Returns the source of samples that are never changed. It is the same object for the same arrays, so that all
    nodes of a process hold the test samples only once."""
    if not isinstance(samples, Samples):
        return Source(samples, device)
    key = (id(samples.inputs), id(samples.targets), samples.scale, samples.offset, samples.ids, str(device))
    found = _sources.get(key)
    if found is None:
        found = _sources[key] = Source(samples, device)
        found.kept = samples  # keeps the arrays alive, so that no other array gets their ids
    return found


class Source:
    """The samples of a split, any of which can be taken as a batch of tensors."""

    def __init__(
        self, samples: AnySamples, device: torch.device, move: Callable[[Tensor, torch.device], Tensor] = Tensor.to
    ) -> None:
        """move: copies an array to the device."""
        self._device, self._move = device, move
        self.zero: float | Tensor = 0.0
        """The normalized value of 0, as [C, 1, 1] if channels differ; 0 for samples that a Dataset makes."""
        self.images = samples if isinstance(samples, ImageFiles) else None
        """The samples if they are read from image files, else None."""
        self.kept: AnySamples | None = None
        """Keeps the samples alive for `source_of`."""
        self._lazy = samples if isinstance(samples, LazySamples) else None
        self._length = len(samples)
        if isinstance(samples, Samples):
            self._load_arrays(samples)
        if self.images is not None:
            self.zero = _by_channel(self.images.offset, device)

    def _load_arrays(self, samples: Samples) -> None:
        self._targets = _Array(samples.targets, self._device, self._move)
        self._inputs = _Array(samples.inputs, self._device, self._move)
        self._scale, self._offset, self._ids = samples.scale, samples.offset, samples.ids
        self.zero = _by_channel(samples.offset, self._device)
        if not self._ids and isinstance(samples.inputs, np.ndarray) and samples.inputs.size * 4 <= CONVERT_ONCE_BYTES:
            self._inputs = self._inputs.with_tensor(self._normalize(self._inputs.unmasked(self._inputs.tensor)))
            self._scale, self._offset = 1.0, 0.0

    @classmethod
    def joined(cls, sources: Sequence[Source]) -> Source | None:
        """Returns a source with the concatenated samples of all `sources`. Arrays of the given sources become views of
        the joined ones, so that nothing is stored twice; for rows, which share one sequence, only their positions are
        concatenated. Returns None for sources that cannot be joined: lazy samples, or rows of different sequences."""
        first = sources[0]
        if any(each._lazy is not None or each._join_key != first._join_key for each in sources):
            return None
        joined = copy.copy(first)
        joined.kept, joined._length = None, sum(map(len, sources))
        for name in ("_inputs", "_targets"):
            arrays = [getattr(each, name) for each in sources]
            if arrays[0].rows is not None:
                setattr(joined, name, arrays[0].with_rows([each.rows for each in arrays]))
                continue
            whole = torch.cat([each.tensor for each in arrays])
            setattr(joined, name, arrays[0].with_tensor(whole))
            start = 0
            for array in arrays:
                stop = start + len(array.tensor)
                array.tensor, start = whole[start:stop], stop
        return joined

    @property
    def _join_key(self) -> tuple[object, ...]:
        """The properties that must be equal in sources that are joined."""
        return self._scale, self._offset, self._ids, self._inputs.join_key, self._targets.join_key

    def __len__(self) -> int:
        return self._length

    @property
    def unequal(self) -> bool:
        """Whether samples are rows of unequal length, so that nearly every batch has a different shape."""
        return self._lazy is None and self._inputs.unequal

    @property
    def sample_elements(self) -> int:
        """The largest number of elements in the inputs of one sample."""
        if self.images is not None:
            return math.prod(self.images.input_shape)
        if self._lazy is not None:
            if not self._length:
                return 1
            return max(1, math.prod(self._lazy.fetch(np.zeros(1, np.int64)).inputs.shape))
        return max(1, self._inputs.elements)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normalized copies of the samples at `indices` [M] int64 (on the CPU): inputs [M, *input_shape]
        float32, or int64 if they are ids, and targets [M, *target_shape] float32 or int64. Rows are padded to the
        longest one in the batch. Does not wait for a GPU."""
        if self._lazy is not None:
            return self.ready(self._lazy.fetch(indices.numpy()))
        targets = self._targets.take(indices)
        kind = torch.float32 if targets.is_floating_point() else torch.int64
        return self._normalize(self._inputs.take(indices)), targets.to(kind)

    def ready(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Returns what `take` returns, for samples that are in memory already."""
        return Source(samples, self._device, moved).take(torch.arange(len(samples)))

    def batches(self, chunks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batch of samples, as returned by `take`, at each non-empty one of the index tensors `chunks`.
        Image files are read ahead."""
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
    """Returns a scalar, or a value per channel as [C, 1, 1], to combine with images [B, C, H, W]."""
    return moved(torch.tensor(value)[:, None, None], device) if isinstance(value, tuple) else value


class _Sequence:
    """A sequence on a device, and the array from which it was made; keeping the array alive ensures that no other one
    gets its address."""

    def __init__(self, array: np.ndarray, tensor: Tensor) -> None:
        self._array, self.tensor = array, tensor


_sequences: weakref.WeakValueDictionary[tuple[object, ...], _Sequence] = weakref.WeakValueDictionary()


def _sequence_of(
    array: np.ndarray, device: torch.device, move: Callable[[Tensor, torch.device], Tensor]
) -> _Sequence:
    """Returns the sequence from which rows are taken. It is the same object for the same array, so that all nodes of a
    process hold it only once."""
    key = (array.ctypes.data, array.shape, array.dtype.str, str(device))
    found = _sequences.get(key)
    if found is None:
        found = _sequences[key] = _Sequence(array, move(torch.from_numpy(array), device))
    return found


class _Array:
    """An array, or rows of a sequence, from which batches are taken."""

    def __init__(
        self, values: np.ndarray | Rows, device: torch.device, move: Callable[[Tensor, torch.device], Tensor]
    ) -> None:
        array = values.values if isinstance(values, Rows) else values
        self.mask = VALUE_MASKS.get(array.dtype)
        """If not None, `tensor` holds the bits of unsigned numbers, and this is the mask of their value."""
        array = array.view(SIGNED_TWINS.get(array.dtype, array.dtype))
        self._device = device
        self.elements = math.prod(values.shape[1:])
        self.rows = values if isinstance(values, Rows) else None
        self._sequence = _sequence_of(array, device, move) if self.rows is not None else None
        self.tensor = move(torch.from_numpy(array), device) if self._sequence is None else self._sequence.tensor
        if self.rows is not None:
            self._set_rows(self.rows)

    def _set_rows(self, rows: Rows) -> None:
        self.rows, self.elements = rows, math.prod(rows.shape[1:])
        self._starts = torch.from_numpy(np.asarray(rows.starts, np.int64))
        fixed = isinstance(rows.lengths, int)
        self._lengths = None if fixed else torch.from_numpy(np.asarray(rows.lengths, np.int64))

    @property
    def join_key(self) -> tuple[object, ...]:
        """The properties that must be equal in arrays that are joined."""
        kind = self.tensor.dtype, self.mask, self.tensor.shape[1:]
        if self.rows is None:
            return kind
        return *kind, self._sequence, self.rows.padding, self.rows.lengths if self._lengths is None else None

    def with_rows(self, rows: Sequence[Rows]) -> _Array:
        """Returns the concatenated rows of all `rows`, whose `join_key` must equal this one's."""
        found, first = copy.copy(self), rows[0]
        starts, lengths = (np.concatenate([np.asarray(value, np.int64) for value in values]) for values in (
            [each.starts for each in rows], [np.atleast_1d(each.lengths) for each in rows]))  # fmt: skip
        found._set_rows(replace(first, starts=starts, lengths=first.lengths if self._lengths is None else lengths))
        return found

    @property
    def unequal(self) -> bool:
        """Whether the values are rows that may have different lengths."""
        return self.rows is not None and self._lengths is not None

    def with_tensor(self, tensor: Tensor) -> _Array:
        """Returns a copy of this object with `tensor` as its values."""
        found = copy.copy(self)
        found.tensor = tensor
        if tensor.dtype != self.tensor.dtype:
            found.mask = None
        return found

    def unmasked(self, taken: Tensor) -> Tensor:
        """Returns the values of elements that were taken from `tensor`: unsigned numbers as int64, others unchanged."""
        return taken if self.mask is None else taken.to(torch.int64) & self.mask

    def take(self, indices: Tensor) -> Tensor:
        """Returns the elements or rows at `indices`, as `Source.take` does, without normalization."""
        if self.rows is None:
            return self.unmasked(self.tensor.index_select(0, moved(indices, self._device)))
        starts = moved(self._starts.index_select(0, indices), self._device)
        if self._lengths is None:
            return self.unmasked(self.tensor[starts[:, None] + torch.arange(self.rows.longest, device=self._device)])
        lengths = self._lengths.index_select(0, indices)
        width = torch.arange(int(lengths.max()) if len(lengths) else 0, device=self._device)
        is_inside = width < moved(lengths, self._device)[:, None]
        found = self.unmasked(self.tensor[torch.where(is_inside, starts[:, None] + width, 0)])
        if not found.is_floating_point():
            found = found.to(torch.int64)  # the padding of targets is negative
        return found.where(is_inside.reshape(*is_inside.shape, *[1] * (found.ndim - 2)), self.rows.padding)
