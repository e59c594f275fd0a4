"""Which entries of a vector to send."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLE = 1 << 16
"""Scores in the sample: enough for bounds about 3 % of `count` apart, cheap beside a pass over the model."""


def count_of(fraction: float, elements: int) -> int:
    """Entries that a fraction of a model stands for: at least one, rounded to nearest."""
    return min(elements, max(1, round(fraction * elements)))


def largest(scores: Tensor, count: int) -> Tensor:
    """[count] int64, ascending: where the `count` largest of scores [P] >= 0 stand; of equal ones the first.

    NaN counts as larger than everything. A sample gives two bounds that surely have the threshold between them; the
    few scores between are then ranked exactly.
    """
    elements = scores.numel()
    if count >= elements:
        return torch.arange(elements, device=scores.device)
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    bounds = _bounds(scores, count)
    if bounds is not None:
        low, high = bounds
        chosen = scores >= high
        near = _nonzero((scores < low).logical_not_().logical_xor_(chosen))
        missing = count - int(chosen.sum())
        if 0 <= missing <= near.numel():
            chosen[near[_largest_of(scores[near], missing)]] = True
            return _nonzero(chosen)
    return _largest_of(scores, count)


def _largest_of(values: Tensor, count: int) -> Tensor:
    """Ascending positions of the `count` largest, of equal ones the first; by partition."""
    if not 0 < count < values.numel():
        return torch.arange(count, device=values.device)
    values = values.nan_to_num(float("inf"), float("inf"))
    bound = _kth_largest(values, count)
    keep = values >= bound
    kept = _nonzero(keep)
    if kept.numel() > count:
        keep[_nonzero(values == bound)[count - kept.numel() :]] = False
        kept = _nonzero(keep)
    return kept


def _kth_largest(values: Tensor, k: int) -> Tensor:
    at = values.numel() - k
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.tensor(np.partition(values.numpy(), at)[at])  # several times faster than kthvalue
    return values.kthvalue(at + 1).values


def _bounds(scores: Tensor, count: int) -> tuple[float, float] | None:
    """Bounds that about `count` plus, and minus, a margin of scores reach; None where a sample does not tell."""
    elements = scores.numel()
    step = elements // SAMPLE
    if step < 4:
        return None
    sample = scores[:: step | 1].nan_to_num(float("inf"), float("inf"))
    share = count * sample.numel() / elements
    margin = 4 * share**0.5 + 4
    more, fewer = int(share + margin), int(share - margin)
    if more >= sample.numel():
        return None
    low = float(_kth_largest(sample, more))
    return (low, float(_kth_largest(sample, fewer)) if fewer > 0 else float("inf")) if low > 0 else None


def _nonzero(flags: Tensor) -> Tensor:
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().view(-1)


def at_random(fraction: float, elements: int, draws: np.random.Generator) -> Tensor:
    """Ascending int64: every position is taken with this probability, independently.

    Drawn as gaps between the taken ones, so that the cost goes with their number.
    """
    if fraction >= 1:
        return torch.arange(elements)
    found, last = [], -1
    while last < elements:
        more = int((elements - last) * fraction + 4 * ((elements - last) * fraction) ** 0.5 + 16)
        piece = draws.geometric(fraction, more).cumsum() + last
        found.append(piece)
        last = int(piece[-1])
    taken = np.concatenate(found)
    return torch.from_numpy(taken[: np.searchsorted(taken, elements)])
