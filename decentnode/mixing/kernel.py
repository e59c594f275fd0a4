"""The weighted sum as one Triton kernel. Imported only if there is a GPU; raises ImportError without Triton.

So far it has run in Triton's interpreter on the CPU and was compiled for an H100, but has never run on a GPU.
tests/test_mixing.py checks in the machine code that whole blocks are loaded 16 bytes at a time, with several loads in
flight in each thread.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements per program: 16 float32 for each of 256 threads."""


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]
    out, x, r0, r1, r2, r3, r4, r5, r6, r7, w, w0, w1, w2, w3, w4, w5, w6, w7, at, inside, ARRIVALS: tl.constexpr
):
    """out = w x + w0 r0 + ..., added in float32 in this order. Reads and writes every element once. inside: mask."""
    total = tl.load(x + at, mask=inside).to(tl.float32) * w
    if ARRIVALS > 0:
        total += tl.load(r0 + at, mask=inside).to(tl.float32) * w0
    if ARRIVALS > 1:
        total += tl.load(r1 + at, mask=inside).to(tl.float32) * w1
    if ARRIVALS > 2:
        total += tl.load(r2 + at, mask=inside).to(tl.float32) * w2
    if ARRIVALS > 3:
        total += tl.load(r3 + at, mask=inside).to(tl.float32) * w3
    if ARRIVALS > 4:
        total += tl.load(r4 + at, mask=inside).to(tl.float32) * w4
    if ARRIVALS > 5:
        total += tl.load(r5 + at, mask=inside).to(tl.float32) * w5
    if ARRIVALS > 6:
        total += tl.load(r6 + at, mask=inside).to(tl.float32) * w6
    if ARRIVALS > 7:
        total += tl.load(r7 + at, mask=inside).to(tl.float32) * w7
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def _weighted_sum(  # type: ignore[no-untyped-def]
    out, x, r0, r1, r2, r3, r4, r5, r6, r7, w, w0, w1, w2, w3, w4, w5, w6, w7, n,
    ARRIVALS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Runs one program per block. Whole blocks have no mask: with one, Triton 3.6 reads element by element instead of
    16 bytes at a time, unless it knows that n is a multiple of 16."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    at = start + tl.arange(0, BLOCK_SIZE)
    if start + BLOCK_SIZE <= n:
        _add_up(out, x, r0, r1, r2, r3, r4, r5, r6, r7, w, w0, w1, w2, w3, w4, w5, w6, w7, at, None, ARRIVALS)
    else:
        _add_up(out, x, r0, r1, r2, r3, r4, r5, r6, r7, w, w0, w1, w2, w3, w4, w5, w6, w7, at, at < n, ARRIVALS)


def launch(out: Tensor, model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]) -> None:
    """Does what `mix_into` does, for up to 8 payloads: contiguous [P] tensors of 32 or 16 bits on one device. Does not
    block."""
    tensors = [tensor for tensor, _ in received]
    weights = [w for _, w in received]
    unused = 8 - len(received)
    grid = (triton.cdiv(out.numel(), BLOCK),)
    with torch.cuda.device_of(out):
        _weighted_sum[grid](
            out, model, *tensors, *[model] * unused, float(weight), *map(float, weights), *[0.0] * unused,
            out.numel(), ARRIVALS=len(received), BLOCK_SIZE=BLOCK, num_warps=8,
        )  # fmt: skip


def launch_once(device: torch.device) -> None:
    """Compiles the kernel and launches it on one element. Does not wait for the device. Triton compiles the launcher of
    its kernels with the machine's C compiler, Python's headers and libcuda; if one of them is missing, this raises
    Triton's error (RuntimeError, CalledProcessError, OSError, AssertionError)."""
    one = torch.ones(1, device=device)
    launch(torch.empty_like(one), one, 1.0, [(one, 1.0)])
