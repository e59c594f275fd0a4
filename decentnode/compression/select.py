"""Selects the entries of a vector to send: the largest ones, or random ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decentnode.compression import bits

SAMPLE = 1 << 16
"""Scores in the sample. Its bounds are about 3 % of `count` apart, and it takes little time beside a pass over the
model."""
BLOCK = 1 << 17
"""Scores compared at a time; few enough that they and their flags stay in a core's cache from one pass to the next."""


def count_of(fraction: float, elements: int) -> int:
    """Returns how many entries a fraction of a model is: at least one, rounded to nearest."""
    return min(elements, max(1, round(fraction * elements)))


def largest(scores: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` largest of scores [P] >= 0: [count] int64, ascending; of equal scores, the
    first.

    NaN counts as infinity. A sample of the scores gives a lower and an upper bound of the threshold. Scores at or above
    the upper bound are taken, those below the lower bound are not, and only the few in between are ranked.
    """
    elements = scores.numel()
    if count >= elements:
        return torch.arange(elements, device=scores.device)
    if count <= 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    if scores.device.type != "cpu":
        return _largest_on_device(scores, count)
    bounds = _threshold_bounds(scores, count)
    kept = None if bounds is None else _largest_with_threshold_in(scores, count, *bounds)
    return _largest_by_partition(scores, count) if kept is None else kept


def _largest_on_device(scores: Tensor, count: int) -> Tensor:
    """Returns the result of `largest` using only tensors of known sizes, so that the host does not wait for the
    device."""
    values = scores.nan_to_num(float("inf"), float("inf"))
    bound = values.topk(count, sorted=False).values.amin()
    above, equal = values > bound, values == bound
    nth = equal.cumsum(0, dtype=torch.int32 if values.numel() < 1 << 31 else torch.int64)
    return bits.positions(above | (equal & (nth <= count - above.sum())), count)


def _largest_with_threshold_in(scores: Tensor, count: int, low: float, high: float) -> Tensor | None:
    """Returns the result of `largest` if the threshold is at least `low` and below `high`, else None."""
    at, below, near = _candidates(scores, low, high, count + count // 8)
    missing = count - at.numel() + near.numel()
    if not 0 < missing <= near.numel():
        return None
    bound = _kth_largest(near, missing)
    less, equal = bits.positions(near < bound), bits.positions(near == bound)
    surplus = near.numel() - missing - less.numel()
    keep = torch.ones_like(at, dtype=torch.bool)
    keep[below[less]] = False
    keep[below[equal[equal.numel() - surplus :]]] = False
    return torch.from_numpy(at.numpy()[keep.numpy()])


def _candidates(scores: Tensor, low: float, high: float, expected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ascending positions of scores that are NaN or at least `low`; which of these are below `high`; their
    scores.

    expected: about how many scores are at least `low`; room is allocated for this many.
    """
    found = torch.empty(min(scores.numel(), expected + BLOCK), dtype=torch.int64)
    all_below, all_near, start, end = [], [], 0, 0
    for block in scores.split(BLOCK):
        at = bits.positions((block < low).logical_not_())
        values = block.index_select(0, at)
        below = bits.positions(values < high)
        all_near.append(values.index_select(0, below))
        all_below.append(below.add_(end))
        if end + at.numel() > found.numel():
            found = torch.cat([found[:end], torch.empty(scores.numel() - end, dtype=torch.int64)])
        torch.add(at, start, out=found[end : end + at.numel()])
        start, end = start + block.numel(), end + at.numel()
    return found[:end], torch.cat(all_below), torch.cat(all_near)


def _first_of_equal(kept: Tensor, values: Tensor, bound: float, count: int) -> Tensor:
    """Returns `count` of the positions `kept` [count or more]: those with values above `bound`, and the first that
    equal it."""
    if kept.numel() == count or bound == float("inf"):
        return kept[:count]
    keep = torch.ones_like(kept, dtype=torch.bool)
    keep[bits.positions(values == bound)[count - kept.numel() :]] = False
    return kept[bits.positions(keep)]


def _largest_by_partition(values: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` largest values, ascending; of equal values, the first. Uses a partition."""
    values = values.nan_to_num(float("inf"), float("inf"))
    bound = float(_kth_largest(values, count))
    kept = bits.positions(values >= bound)
    return _first_of_equal(kept, values[kept], bound, count)


def _kth_largest(values: Tensor, k: int) -> Tensor:
    at = values.numel() - k
    if values.dtype in (torch.float32, torch.float64):
        return torch.tensor(np.partition(values.numpy(), at)[at])  # several times faster than kthvalue
    return values.kthvalue(at + 1).values


def _threshold_bounds(scores: Tensor, count: int) -> tuple[float, float] | None:
    """Returns bounds that about `count` scores, plus and minus a margin, reach; None if the sample is too small,
    or the lower bound is 0."""
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


def random_positions(fraction: float, elements: int, draws: np.random.Generator) -> Tensor:
    """Returns positions below `elements`, ascending int64, each taken independently with probability `fraction`.

    The gaps between them are drawn, so that the time grows with the number of positions taken.
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
