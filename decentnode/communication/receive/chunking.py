"""Cuts payloads into chunks, by a function of the local schema alone, so that both ends cut alike."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decentnode.communication.parts import Schema
from decentnode.payload import TensorSpec
from decentnode.tensors import BLOCK_ELEMENTS, as_bytes

MESSAGE_COST = 256
"""Bytes that flow control counts for a chunk's header, so that empty chunks are not free."""


def chunk_elements(chunk_bytes: int, dtype: torch.dtype) -> int:
    """Returns the elements per chunk: a whole number of blocks, at least one, so that mixing cuts tensors alike on
    every transport."""
    return max(1, chunk_bytes // (BLOCK_ELEMENTS * dtype.itemsize)) * BLOCK_ELEMENTS


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the schema is cut into chunks."""

    name: str
    spec: TensorSpec
    elements_per_chunk: int

    @functools.cached_property
    def expected(self) -> int | None:
        """Elements of this tensor in every payload; None if payloads may differ."""
        return self.spec.max_elements if self.spec.exact else None

    def count(self, total: int) -> int:
        """Returns the number of chunks of a tensor of `total` elements; an empty tensor still has one."""
        return -(-total // self.elements_per_chunk) or 1

    def bounds(self, chunk: int, total: int) -> tuple[int, int]:
        start = chunk * self.elements_per_chunk
        stop = start + self.elements_per_chunk
        return start, stop if stop < total else total

    def accepts(self, total: int) -> bool:
        """Returns whether a payload may have this many elements."""
        return total == self.spec.max_elements if self.spec.exact else 0 <= total <= self.spec.max_elements


def plans(schema: Schema, chunk_bytes: int) -> tuple[TensorPlan, ...]:
    """Returns one plan per tensor, in the schema's order; the index is the wire's `tensor`."""
    return tuple(
        TensorPlan(name, spec, chunk_elements(chunk_bytes, spec.dtype)) for name, spec in schema.tensors.items()
    )


def mismatch(plans: tuple[TensorPlan, ...], tensors: Mapping[str, Tensor]) -> str:
    """Returns what is wrong with a payload's tensors, as "must be ..., got ..."; empty if they fit the schema."""
    names = [plan.name for plan in plans]
    if list(tensors) != names:
        return f"must have tensors {names}, got {list(tensors)}"
    for plan in plans:
        tensor = tensors[plan.name]
        if tensor.dtype != plan.spec.dtype or tensor.dim() != 1 or not plan.accepts(tensor.numel()):
            return (f"{plan.name!r} must be [{plan.spec.max_elements}] {plan.spec.dtype}, "
                    f"got {list(tensor.shape)} {tensor.dtype}")  # fmt: skip
    return ""


def from_buffer(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    """Returns a 1-D tensor over received bytes, without a copy."""
    return torch.frombuffer(buffer, dtype=dtype) if buffer.nbytes else torch.empty(0, dtype=dtype)


def to_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a 1-D tensor; copies them to the host first if it is on a GPU."""
    return as_bytes(tensor.contiguous() if tensor.is_cpu else tensor.cpu())
