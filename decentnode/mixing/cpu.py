"""The weighted sum on a CPU as one loop over memory, in C; compiled at first use if there is a compiler."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from decentnode import native

SMALLEST = 256
"""Models with fewer elements use torch's operations, which are as fast there."""
_PER_THREAD = 1 << 17


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled loops; None if there is no compiler, or it fails. The first call in a process blocks."""
    loaded = native.compiled(Path(__file__).with_name("weighted_sum.c"))
    if loaded is not None:
        address, size = ctypes.c_void_p, ctypes.c_size_t
        loaded.weighted_sum.argtypes = [size, address, address, ctypes.c_float, size, address, address]
        loaded.weighted_sum.restype = None
        loaded.weighted_rows.argtypes = [size, size, size, size, size, *[address] * 6]
        loaded.weighted_rows.restype = None
    return loaded


@functools.cache
def _arrays(count: int) -> tuple[type[ctypes.Array[ctypes.c_float]], type[ctypes.Array[ctypes.c_void_p]]]:
    return ctypes.c_float * count, ctypes.c_void_p * count


def suits(out: Tensor, model: Tensor, received: Sequence[tuple[Tensor, float]]) -> bool:
    """Returns whether `weighted_sum` can be used: for contiguous float32 tensors of at least SMALLEST elements."""
    if model.numel() < SMALLEST or library() is None:
        return False
    for each in (out, model, *[tensor for tensor, _ in received]):
        if each.dtype != torch.float32 or not each.is_contiguous():
            return False
    return True


def weighted_sum(out: Tensor, model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]) -> None:
    """Does what `mix_into` does, for tensors that `suits` accepts. Blocks; large models are divided among threads."""
    loaded = library()
    assert loaded is not None
    elements, count = model.numel(), len(received)
    floats, addresses = _arrays(count)
    weights, begin = floats(*[w for _, w in received]), [tensor.data_ptr() for tensor, _ in received]
    to, of = out.data_ptr(), model.data_ptr()

    def call(start: int, stop: int) -> None:
        at = 4 * start
        there = addresses(*[address + at for address in begin])
        loaded.weighted_sum(stop - start, to + at, of + at, weight, count, there, weights)

    threads = min(native.threads(), elements // _PER_THREAD)
    if threads < 2:
        call(0, elements)
    else:
        shares = native.shares(elements, threads)
        native.spread(call, shares, len(shares))
