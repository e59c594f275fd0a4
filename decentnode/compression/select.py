"""Which entries of a vector to send."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLE = 1 << 16


def count_of(fraction: float, elements: int) -> int:
    """Entries that a fraction of a model stands for: at least one, rounded to nearest."""
    return min(elements, max(1, round(fraction * elements)))


def largest(scores: Tensor, count: int) -> Tensor:
    """[count] int64, ascending: where the `count` largest of scores [P] >= 0 stand; of equal ones the first.

    NaN counts as larger than everything. A sample gives a bound that slightly more than `count` scores reach, and
    the choice is made exactly among these.
    """
    elements = scores.numel()
    if count >= elements:
        return torch.arange(elements, device=scores.device)
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    candidates = _candidates(scores, count)
    among = scores if candidates is None else scores[candidates]
    if bool(among.max().isnan()):
        among = among.nan_to_num(float("inf"), float("inf"))
    bound = _kth_largest(among, count)
    keep = among >= bound
    kept = _nonzero(keep)
    if kept.numel() > count:  # equal ones at the bound: the first stay
        keep[_nonzero(among == bound)[count - kept.numel() :]] = False
        kept = _nonzero(keep)
    return kept if candidates is None else candidates[kept]


def _kth_largest(values: Tensor, k: int) -> Tensor:
    at = values.numel() - k
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.tensor(np.partition(values.numpy(), at)[at])  # several times faster than kthvalue
    return values.kthvalue(at + 1).values


def _candidates(scores: Tensor, count: int) -> Tensor | None:
    """Ascending positions of at least `count` of the largest scores, few more; None when a sample does not help."""
    elements = scores.numel()
    step = elements // SAMPLE
    if step < 4:
        return None
    sample = scores[:: step | 1].clone()
    share = sample.numel() / elements
    rank = int(count * share + 4 * (count * share) ** 0.5 + 4)
    if rank >= sample.numel():
        return None
    bound = _kth_largest(sample, rank)
    if not bool(bound > 0):
        return None
    found = _nonzero((scores < bound).logical_not_())
    return found if count <= found.numel() < elements // 2 + count else None


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
