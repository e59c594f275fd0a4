"""Encodes a compressed bucket as one tensor of bytes, whose length all ranks know in advance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from decentnode.compression import indices, select
from decentnode.parallel.planning.rules import Coding
from decentnode.payload import TensorSpec


class Packing:
    """Encodes values [S] as bytes [size_bytes] on the same device, and decodes them."""

    def __init__(self, coding: Coding, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """sizes: entries of each parameter, S together. Raises ValueError for a codec whose output size is not fixed,
        and for values that no codec takes."""
        self._entries, self._dtype = sum(sizes), dtype
        self._count = select.count_of(coding.fraction, self._entries)
        self._sends_all = self._count == self._entries
        self._codec = coding.codec
        if self._codec is not None and not dtype.is_floating_point:
            raise ValueError(f"parameters must be floating point to be compressed, got {dtype}")
        if self._codec is not None and self._sends_all:
            self._codec = self._codec.divided(sizes)
        specs: dict[str, TensorSpec] = {"values": TensorSpec(dtype, self._count)}
        if self._codec is not None:
            specs = self._codec.schema(self._count, dtype)
        if not all(spec.exact for spec in specs.values()):
            name = "the codec" if self._codec is None else self._codec.config.name
            raise ValueError(f"compression must have an output size that is known in advance, got {name}")
        self._divisor = 1.0 + (self._codec.variance if self._codec is not None and coding.differences else 0.0)
        """The divisor of decoded values, which keeps changes from being too large (sharing/operator.py)."""
        if not self._sends_all:
            specs = {"at": TensorSpec(torch.uint8, indices.fixed_bytes(self._count, self._entries)), **specs}
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        """Tensor -> its bytes [a:b) and its dtype. The widest dtypes come first, so that all are aligned."""
        end = 0
        for name, spec in sorted(specs.items(), key=lambda each: -each[1].dtype.itemsize):
            start, end = end, end + spec.max_elements * spec.dtype.itemsize
            self._places[name] = (start, end, spec.dtype)
        self.size_bytes = end

    def encode(self, values: Tensor, out: Tensor, draws: torch.Generator | None = None) -> None:
        """Writes values [S] to `out` [size_bytes] uint8. draws: a generator on the same device, for codecs that round
        at random."""
        coded: dict[str, Tensor] = {}
        if not self._sends_all:
            at = select.largest(values.abs(), self._count)
            coded["at"], values = indices.encode_fixed(at, self._entries), values.index_select(0, at)
        coded.update({"values": values} if self._codec is None else self._codec.encode(values, draws))
        for name, tensor in self._tensors(out):
            tensor.copy_(coded[name])

    def add_to(self, copy: Tensor, packed: Tensor) -> None:
        """Adds the decoded values to copy [S]. packed: [size_bytes] uint8. Raises PeerFault for malformed bytes."""
        found = dict(self._tensors(packed))
        values = self._values(found)
        if self._sends_all:
            copy.add_(values)
        else:
            copy.index_add_(0, indices.decode_fixed(found["at"], self._count, self._entries), values)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Writes the decoded values to `out` [S], if all entries were encoded. Raises as `add_to`."""
        out.copy_(self._values(dict(self._tensors(packed))))

    def _values(self, found: Mapping[str, Tensor]) -> Tensor:
        if self._codec is None:
            return found["values"]
        values = self._codec.decode(found, self._count, self._dtype)
        return values if self._divisor == 1.0 else values.div_(self._divisor)

    def _tensors(self, packed: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, (start, stop, dtype) in self._places.items():
            yield name, packed[start:stop].view(dtype)
