"""Which entries of a vector to send."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLE = 1 << 16
"""Scores in the sample: enough for bounds about 3 % of `count` apart, cheap beside a pass over the model."""
BLOCK = 1 << 17
"""Scores that are looked at together: they and their flags stay in a core's cache from one pass to the next."""


def count_of(fraction: float, elements: int) -> int:
    """Entries that a fraction of a model stands for: at least one, rounded to nearest."""
    return min(elements, max(1, round(fraction * elements)))


def largest(scores: Tensor, count: int) -> Tensor:
    """[count] int64, ascending: where the `count` largest of scores [P] >= 0 stand; of equal ones the first.

    NaN counts as infinity. A sample gives two bounds that surely have the threshold between them; of what reaches the
    lower one, the few that do not reach the upper one are ranked exactly.
    """
    elements = scores.numel()
    if count >= elements:
        return torch.arange(elements, device=scores.device)
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    bounds = _bounds(scores, count)
    kept = None if bounds is None else _within(scores, count, *bounds)
    return _largest_of(scores, count) if kept is None else kept


def _within(scores: Tensor, count: int, low: float, high: float) -> Tensor | None:
    """As `largest` where the threshold is at least `low` and below `high`; None where it is not."""
    at, below, near = _candidates(scores, low, high, count + count // 8)
    missing = count - at.numel() + near.numel()
    if not 0 < missing <= near.numel():
        return None
    bound = _kth_largest(near, missing)
    less, equal = _nonzero(near < bound), _nonzero(near == bound)
    surplus = near.numel() - missing - less.numel()
    keep = torch.ones_like(at, dtype=torch.bool)
    keep[below[less]] = False
    keep[below[equal[equal.numel() - surplus :]]] = False
    return torch.from_numpy(at.numpy()[keep.numpy()]) if at.device.type == "cpu" else at[keep]


def _candidates(scores: Tensor, low: float, high: float, expected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending positions of scores that reach `low` or are NaN; which of these are below `high`, and their scores.

    expected: about how many reach `low`, to make room for.
    """
    found = torch.empty(min(scores.numel(), expected + BLOCK), dtype=torch.int64, device=scores.device)
    all_below, all_near, start, end = [], [], 0, 0
    for block in scores.split(BLOCK) if scores.device.type == "cpu" else (scores,):
        at = _nonzero((block < low).logical_not_())
        values = block.index_select(0, at)
        below = _nonzero(values < high)
        all_near.append(values.index_select(0, below))
        all_below.append(below.add_(end))
        if end + at.numel() > found.numel():
            found = torch.cat([found[:end], torch.empty(scores.numel() - end, dtype=torch.int64, device=at.device)])
        torch.add(at, start, out=found[end : end + at.numel()])
        start, end = start + block.numel(), end + at.numel()
    return found[:end], torch.cat(all_below), torch.cat(all_near)


def _without_last(kept: Tensor, values: Tensor, bound: float, count: int) -> Tensor:
    """The first `count` of kept [>= count] whose values are above `bound` or equal it; only equal ones are left out."""
    if kept.numel() == count or bound == float("inf"):
        return kept[:count]
    keep = torch.ones_like(kept, dtype=torch.bool)
    keep[_nonzero(values == bound)[count - kept.numel() :]] = False
    return kept[_nonzero(keep)]


def _largest_of(values: Tensor, count: int) -> Tensor:
    """Ascending positions of the `count` largest, of equal ones the first; by partition."""
    values = values.nan_to_num(float("inf"), float("inf"))
    bound = float(_kth_largest(values, count))
    kept = _nonzero(values >= bound)
    return _without_last(kept, values[kept], bound, count)


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
