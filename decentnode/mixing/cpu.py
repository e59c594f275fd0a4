"""The weighted sum as one compiled loop over memory, where a compiler is found."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from decentnode import native

SMALLEST = 256
"""Elements below which torch's own operations are as quick."""
_PER_THREAD = 1 << 17


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where there is no compiler, or it does not do. Blocking, once in a process."""
    return native.compiled(Path(__file__).with_name("weighted_sum.c"))


def suits(out: Tensor, model: Tensor, received: Sequence[tuple[Tensor, float]]) -> bool:
    """Whether `weighted_sum` takes these: float32 in one piece each."""
    tensors = (out, model, *(tensor for tensor, _ in received))
    return (
        len(model) >= SMALLEST
        and all(each.dtype == torch.float32 and each.is_contiguous() for each in tensors)
        and library() is not None
    )


def weighted_sum(out: Tensor, model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]) -> None:
    """`mix_into` for what `suits`. Blocking; several threads of torch's share a large model."""
    loaded = library()
    assert loaded is not None
    elements, count = model.numel(), len(received)
    weights = (ctypes.c_float * count)(*(w for _, w in received))

    def call(start: int, stop: int) -> None:
        at = 4 * start
        addresses = (ctypes.c_void_p * count)(*(tensor.data_ptr() + at for tensor, _ in received))
        loaded.weighted_sum(ctypes.c_size_t(stop - start), ctypes.c_void_p(out.data_ptr() + at),
                            ctypes.c_void_p(model.data_ptr() + at), ctypes.c_float(weight), ctypes.c_size_t(count),
                            addresses, weights)  # fmt: skip

    shares = native.shares(elements, min(torch.get_num_threads(), elements // _PER_THREAD))
    native.spread(call, shares, len(shares))
