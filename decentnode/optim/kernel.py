"""AccumAdam's step on a CPU as one loop over memory, in C, compiled at first use if there is a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentnode import native

MIN_ELEMENTS = 1 << 16
"""Fewest elements for which the compiled loop is used, as compiling it pays off."""
CHUNK_ELEMENTS = 1 << 18
"""Elements that a thread processes at a time."""


def library() -> ctypes.CDLL | None:
    """Returns the compiled loops; None if there is no compiler, or it fails. Compiles once per process, blocking."""
    return native.compiled(Path(__file__).with_name("accum_adam.c"))


def is_usable(params: Sequence[Tensor]) -> bool:
    """Returns whether `step` can update these parameters: enough of them, float32 on a CPU, with a compiler."""
    enough = sum(p.numel() for p in params) >= MIN_ELEMENTS
    return enough and params[0].device.type == "cpu" and params[0].dtype == torch.float32 and library() is not None


def step(
    rows: Sequence[tuple[Tensor, ...]],  # (parameter, gradient, m, v, sum of gradients), all of one dense layout
    *,
    lr: float, betas: tuple[float, float], eps: float, l2: float, shrink: float, maximize: bool, window: int,
    accum_iter: int, last: bool,
) -> None:  # fmt: skip
    """Updates in place, in window `window` (from 1); updates the moments if it is its `last` step. Blocking."""
    compiled = library()
    assert compiled is not None
    beta1, beta2 = betas
    constants = (ctypes.c_float * 10)(
        -1.0 if maximize else 1.0, l2, shrink, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**window),
        (1 - beta2**window) ** -0.5, eps, 1 / accum_iter,
    )  # fmt: skip
    call: Callable[..., Any] = compiled.last if last else compiled.inside
    threads = min(torch.get_num_threads(), sum(row[0].numel() for row in rows) // CHUNK_ELEMENTS)

    def run(elements: int, addresses: list[int]) -> None:
        call(ctypes.c_size_t(elements), *map(ctypes.c_void_p, addresses), constants)

    if threads < 2:
        for row in rows:
            run(row[0].numel(), [t.data_ptr() for t in row])
    else:
        native.spread(run, _chunks(rows), threads)


def _chunks(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[int, list[int]]]:
    """Yields the rows in chunks of at most CHUNK_ELEMENTS elements: (elements, addresses)."""
    for row in rows:
        total, starts = row[0].numel(), [t.data_ptr() for t in row]
        for at in range(0, total, CHUNK_ELEMENTS):
            yield min(CHUNK_ELEMENTS, total - at), [start + 4 * at for start in starts]
