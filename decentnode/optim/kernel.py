"""AccumAdam's step as one loop over memory, for which torch has no operation: C, compiled where a compiler is found."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SMALLEST = 1 << 16
"""Elements below which a step is not worth a compiler's start."""
CHUNK = 1 << 18
"""Elements that a thread takes at a time."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")

SOURCE = r"""
#include <math.h>
#include <stddef.h>

struct constants { float sign, l2, shrink, new1, keep2, new2, step, root, eps, share; };

#define UPDATE                                                                   \
    float gradient = c.sign * g[i] + c.l2 * x[i];                                \
    float first = m[i] + c.new1 * (gradient - m[i]);                             \
    float second = c.keep2 * v[i] + c.new2 * gradient * gradient;                \
    float total = sum[i] + c.share * gradient;                                   \
    x[i] = c.shrink * x[i] - c.step * first / (c.root * sqrtf(second) + c.eps);

void inside(size_t n, float *restrict x, const float *restrict g, float *restrict m, float *restrict v,
            float *restrict sum, const struct constants *constants) {
    struct constants c = *constants;
    for (size_t i = 0; i < n; i++) {
        UPDATE
        sum[i] = total;
    }
}

void last(size_t n, float *restrict x, const float *restrict g, float *restrict m, float *restrict v,
          float *restrict sum, const struct constants *constants) {
    struct constants c = *constants;
    for (size_t i = 0; i < n; i++) {
        UPDATE
        m[i] = m[i] + c.new1 * (total - m[i]);
        v[i] = c.keep2 * v[i] + c.new2 * total * total;
        sum[i] = 0;
    }
}
"""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled loops; None where there is no compiler, or it does not do. Blocking, once in a process."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "accum_adam.c", Path(folder) / "accum_adam.so"
            source.write_text(SOURCE)
            subprocess.run([compiler, *FLAGS, str(source), "-o", str(target), "-lm"], check=True, capture_output=True,
                           timeout=60)  # fmt: skip
            return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("AccumAdam goes without its compiled loop: %s", error)
        return None


def usable(params: Sequence[Tensor]) -> bool:
    """Whether `step` takes these parameters: float32 on a CPU, enough of them, and a compiler is there."""
    enough = sum(p.numel() for p in params) >= SMALLEST
    return enough and params[0].device.type == "cpu" and params[0].dtype == torch.float32 and library() is not None


def step(
    rows: Sequence[tuple[Tensor, ...]],  # (parameter, gradient, m, v, sum of gradients), all of one dense layout
    *,
    lr: float, betas: tuple[float, float], eps: float, l2: float, shrink: float, maximize: bool, window: int,
    accum_iter: int, last: bool,
) -> None:  # fmt: skip
    """One step in window `window` (from 1), in place; `last`: and the moments are committed. Blocking."""
    compiled = library()
    assert compiled is not None
    beta1, beta2 = betas
    constants = (ctypes.c_float * 10)(
        -1.0 if maximize else 1.0, l2, shrink, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**window),
        (1 - beta2**window) ** -0.5, eps, 1 / accum_iter,
    )  # fmt: skip
    call: Callable[..., Any] = compiled.last if last else compiled.inside
    threads = min(torch.get_num_threads(), sum(row[0].numel() for row in rows) // CHUNK)

    def run(chunk: tuple[int, list[int]]) -> None:
        call(ctypes.c_size_t(chunk[0]), *map(ctypes.c_void_p, chunk[1]), constants)

    if threads < 2:
        for row in rows:
            run((row[0].numel(), [t.data_ptr() for t in row]))
    else:
        list(_pool(threads).map(run, _chunks(rows)))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="accum_adam")


def _chunks(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[int, list[int]]]:
    """(elements, addresses) of at most CHUNK elements each."""
    for row in rows:
        total, starts = row[0].numel(), [t.data_ptr() for t in row]
        for at in range(0, total, CHUNK):
            yield min(CHUNK, total - at), [start + 4 * at for start in starts]
