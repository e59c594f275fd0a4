"""The weighted sum of a model and received tensors: in blocks on a CPU, with one kernel on a GPU, else with torch's
operations."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decentnode.mixing import cpu
from decentnode.tensors import block_elements, blocks

logger = logging.getLogger(__name__)

KERNEL_ARRIVALS = 8
"""Received tensors per launch of the kernel. Each further launch reads and writes the result once more."""
_KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def passes(arrivals: int, fused: bool) -> int:
    """Returns how many times P elements are read or written if no cache holds the result: d + 2 if fused, else 2 + 3
    d."""
    if not fused:
        return 2 + 3 * arrivals
    launches = max(1, -(-arrivals // KERNEL_ARRIVALS))
    return arrivals + 2 * launches


def mix_into(out: Tensor, model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]) -> Tensor:
    """out <- weight * model + sum_k w_k r_k, added in the order of `received`; returns `out`.

    out, model: [P] of one floating dtype and device, contiguous. `out` may be the model itself; otherwise they must not
    share memory. received: (r_k [P], w_k) on the same device, of that dtype or a narrower one, which is converted block
    by block. On a CPU the result has the bits of mul and add_ over the whole tensors. A GPU adds products without
    rounding them first (fused multiply-add), and in float32 for models of 16 bits. Does not block on a GPU.

    Raises ValueError for tensors of another shape: loops and kernels would read and write beyond their ends.
    """
    for each in (out, *[tensor for tensor, _ in received]):
        if each.shape != model.shape:
            raise ValueError(f"tensors that are mixed must be {list(model.shape)}, got {list(each.shape)}")
    kernel = _kernel_for_tensors(out, model, received)
    if kernel is not None:
        return _mix_by_kernel(kernel, out, model, weight, received)
    if model.device.type == "cpu":
        if cpu.is_supported(out, model, received):
            cpu.weighted_sum(out, model, weight, received)
            return out
        for a, b in blocks(0, model.numel(), model.device):
            _mix_chained(out[a:b], model[a:b], weight, [(r[a:b], w) for r, w in received])
        return out
    _mix_chained(out, model, weight, received)
    return out


def _mix_chained(out: Tensor, model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]) -> None:
    torch.mul(model, weight, out=out)
    scratch = None
    for tensor, w in received:
        if tensor.dtype == out.dtype:
            out.add_(tensor, alpha=w)
            continue
        # adding another dtype directly converts element by element: 58 ms instead of 8 ms for 25.6 M elements
        if scratch is None:
            scratch = torch.empty(min(out.numel(), block_elements(out.device)), dtype=out.dtype, device=out.device)
        for a, b in blocks(0, out.numel(), out.device):
            out[a:b].add_(scratch[: b - a].copy_(tensor[a:b]), alpha=w)


def uses_fewest_passes(model: Tensor, received: Sequence[tuple[Tensor, float]]) -> bool:
    """Returns whether `mix_into` needs the minimum of `passes` for these tensors, with the model's own memory as
    `out`."""
    return model.device.type == "cpu" or _kernel_for_tensors(model, model, received) is not None


def _kernel_for_tensors(
    out: Tensor, model: Tensor, received: Sequence[tuple[Tensor, float]]
) -> Callable[..., Any] | None:
    """Returns the launcher of the kernel if it accepts these tensors, else None."""
    tensors = [out, model, *(tensor for tensor, _ in received)]
    is_supported = model.device.type == "cuda" and model.numel() > 0
    is_supported = is_supported and all(t.dtype in _KERNEL_DTYPES and t.is_contiguous() for t in tensors)
    return _load_kernel(model.device) if is_supported else None


@functools.cache
def _load_kernel(device: torch.device) -> Callable[..., Any] | None:
    """Returns the launcher of the Triton kernel; None, with one warning, if Triton is missing or cannot launch on this
    device."""
    try:
        from decentnode.mixing.kernel import launch, launch_once

        launch_once(device)
    except Exception as error:  # any error: the sums can be computed without the kernel
        logger.warning("mixing takes several passes over the memory of %s, as Triton launches no kernel there: %s",
                       device, " ".join(str(error).split())[:300] or type(error).__name__)  # fmt: skip
        return None
    found: Callable[..., Any] = launch
    return found


def _mix_by_kernel(
    kernel: Callable[..., Any], out: Tensor, model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]
) -> Tensor:
    kernel(out, model, weight, received[:KERNEL_ARRIVALS])
    for start in range(KERNEL_ARRIVALS, len(received), KERNEL_ARRIVALS):
        kernel(out, out, 1.0, received[start : start + KERNEL_ARRIVALS])
    return out
