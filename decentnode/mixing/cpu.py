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
_ELEMENTS_PER_THREAD = 1 << 17


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled loops; None if there is no compiler, or it fails. The first call in a process blocks."""
    loops = native.compiled(Path(__file__).with_name("weighted_sum.c"))
    if loops is not None:
        address, size = ctypes.c_void_p, ctypes.c_size_t
        loops.weighted_sum.argtypes = [size, address, address, ctypes.c_float, size, address, address]
        loops.weighted_sum.restype = None
        loops.weighted_rows.argtypes = [size, size, size, size, size, *[address] * 6]
        loops.weighted_rows.restype = None
    return loops


@functools.cache
def _arrays(count: int) -> tuple[type[ctypes.Array[ctypes.c_float]], type[ctypes.Array[ctypes.c_void_p]]]:
    return ctypes.c_float * count, ctypes.c_void_p * count


def is_supported(out: Tensor, model: Tensor, received: Sequence[tuple[Tensor, float]]) -> bool:
    """Returns whether `weighted_sum` can be used: for contiguous float32 tensors of at least SMALLEST elements, with a
    compiler."""
    if model.numel() < SMALLEST or library() is None:
        return False
    for each in (out, model, *[tensor for tensor, _ in received]):
        if each.dtype != torch.float32 or not each.is_contiguous():
            return False
    return True


def weighted_sum(out: Tensor, model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]) -> None:
    """Does what `mix_into` does, for tensors that are supported. Blocks; large models are divided among threads."""
    loops = library()
    assert loops is not None
    elements, count = model.numel(), len(received)
    floats, addresses = _arrays(count)
    weights, start_addresses = floats(*[w for _, w in received]), [tensor.data_ptr() for tensor, _ in received]
    out_address, model_address = out.data_ptr(), model.data_ptr()

    def mix_range(start: int, stop: int) -> None:
        offset = 4 * start
        source_addresses = addresses(*[address + offset for address in start_addresses])
        loops.weighted_sum(
            stop - start, out_address + offset, model_address + offset, weight, count, source_addresses, weights
        )

    threads = min(native.threads(), elements // _ELEMENTS_PER_THREAD)
    if threads < 2:
        mix_range(0, elements)
    else:
        shares = native.shares(elements, threads)
        native.spread(mix_range, shares, len(shares))
