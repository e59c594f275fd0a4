"""A fluid simulation of flows on shared resources, from event to event: each begin or end of a flow changes others'
rates.

Flows that can never share a resource are simulated side by side, in independent sets that each have a clock of their
own: thousands of short flows of many nodes then take only as many steps as the longest chain of events among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from decentnode.simulate.timeline import kernel
from decentnode.simulate.timeline.fair import EQUAL, fair_rates

EXACT_FLOWS = 1024
"""Largest set of concurrent flows, connected by common resources, whose rates are computed anew at every begin and end.
For a larger set they are computed anew when COARSE of its flows have ended, or after COARSE of the time within which
half of them end; a flow that begins gets its rate then, or COARSE of that time later."""
COARSE = 1 / 32
MIN_PROGRESS = 1 / 32
"""If more than EXACT_FLOWS are in flight in all, they are advanced at least until this share of them has ended, or for
this share of the time that a flow takes. Flows that would begin in the meantime, because others have ended, begin at
its end."""
SINGLE_SET_FLOWS = 24
"""Up to this many flows are simulated as one set: finding out which of them share resources would take longer."""
CACHED_PATTERNS = 64
"""Number of begin patterns whose durations are cached: without randomness, rounds repeat."""


class Fluid:
    """Flows of given work that pass all their resources at one rate, which is max-min fair at every moment."""

    def __init__(self, resources_each: int) -> None:
        """resources_each: the largest number of resources of a flow."""
        self.now = 0.0
        """The time up to which flows have been simulated."""
        self._uses = np.empty((0, resources_each), int)
        self._max_rates, self._work, self._work_left, self._begin = np.empty(0), np.empty(0), np.empty(0), np.empty(0)
        self._keys = np.empty(0, int)

    def add(
        self, uses: np.ndarray, work: np.ndarray, most: np.ndarray, begins: np.ndarray, keys: np.ndarray
    ) -> None:  # fmt: skip
        """Adds flows that begin at `begins` [F], or now if that is past. uses: [F, K] int, the resources, -1 for none.
        most: [F], the largest rate of each flow by itself. keys: [F] int, the caller's identifiers of the flows."""
        wide = np.full((len(uses), self._uses.shape[1]), -1)
        wide[:, : uses.shape[1]] = uses
        self._uses = np.concatenate([self._uses, wide])
        self._work, self._work_left = np.append(self._work, work), np.append(self._work_left, work)
        self._max_rates = np.append(self._max_rates, most)
        self._begin = np.append(self._begin, begins)
        self._keys = np.append(self._keys, keys)

    def advance(self, until: float, capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Simulates the flows until `until`, or until the first begin or end after it if there is none before; if there
        are many, further (MIN_PROGRESS). capacity: [R]. Returns (keys, end times) of the flows that ended."""
        until = max(until, self.now)
        active = self._begin <= self.now
        if np.isfinite(until) and np.count_nonzero(active) > EXACT_FLOWS:
            rates = fair_rates if kernel.library() is None else kernel.fair_rates
            rate = rates(self._uses[active], capacity, self._max_rates[active])
            step = float(np.quantile(self._work_left[active] / rate, MIN_PROGRESS))
            until = max(until, self.now + min(step, MIN_PROGRESS * float(np.median(self._work[active] / rate))))
        at = np.flatnonzero(self._begin <= until)
        later = float(self._begin.min(initial=np.inf, where=self._begin > until))
        if not at.size:
            bound = later if np.isfinite(later) else until
            self.now = bound if np.isfinite(bound) else self.now
            return np.empty(0, int), np.empty(0)
        ends, self._work_left[at], self.now = self._simulate(at, until, later, capacity)
        over = np.isfinite(ends)
        keys, rest = self._keys[at[over]], np.ones(self._keys.size, bool)
        rest[at[over]] = False
        self._uses, self._max_rates, self._work = self._uses[rest], self._max_rates[rest], self._work[rest]
        self._work_left, self._begin, self._keys = self._work_left[rest], self._begin[rest], self._keys[rest]
        return keys, ends[over]

    def _simulate(
        self, at: np.ndarray, until: float, later: float, capacity: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Simulates the flows `at`. Returns (when each of them ends, infinite if that is later; the work that is left
        then; the time up to which they were simulated). later: when the first of the other flows begins."""
        uses, most, left, begin = self._uses[at], self._max_rates[at], self._work_left[at].copy(), self._begin[at]
        uses = uses[:, (uses >= 0).any(axis=0)]
        label = np.zeros(at.size, int)
        if at.size > SINGLE_SET_FLOWS:
            label = group_flows(uses, np.maximum(begin, self.now), left, most, capacity)
        clock = np.full(int(label.max()) + 1, self.now)
        follow = _simulate_sets if kernel.library() is None else kernel.simulate
        rules = kernel.RateRules(EXACT_FLOWS, COARSE)
        ends, bound = follow(uses, capacity, most, begin, label, left, clock, until=until, later=later, rules=rules)
        return ends, left, bound if np.isfinite(bound) else max(self.now, float(ends.max()))


def _simulate_sets(
    uses: np.ndarray, capacity: np.ndarray, most: np.ndarray, begin: np.ndarray, label: np.ndarray, left: np.ndarray,
    clock: np.ndarray, *, until: float, later: float, rules: kernel.RateRules,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """Does what `kernel.simulate` does, where there is no C compiler."""
    # Each set gets its own copy of the resources: other sets use them at other times.
    names, own = np.unique(np.append(np.where(uses < 0, -1, uses + label[:, None] * capacity.size), -1),
                           return_inverse=True)  # fmt: skip
    uses, capacity = own[:-1].reshape(uses.shape) - 1, capacity[names[1:] % max(capacity.size, 1)]
    ends, bound = np.full(label.size, np.inf), np.nan
    alive = np.arange(label.size)
    while alive.size:
        of = label[alive]
        active = begin[alive] <= clock[of] + EQUAL * (1 + np.abs(clock[of]))
        target = np.full(clock.size, np.inf)
        np.minimum.at(target, of[~active], begin[alive[~active]])
        under_way, of = alive[active], of[active]
        rate = fair_rates(uses[under_way], capacity, most[under_way])
        with np.errstate(divide="ignore", invalid="ignore"):
            last = np.where(np.isinf(rate), 0.0, left[under_way] / rate)
        target = _next(target, clock, of, last, rules)
        if np.isnan(bound):
            bound = max(until, min(float(target.min()), later))
        target = np.minimum(target, bound)
        step = target[of] - clock[of]
        # A clock cannot represent times below its floating-point resolution: flows that end within it have ended.
        over = (last <= step * (1 + EQUAL) + 1e-15) | (clock[of] + last <= target[of])
        ends[under_way[over]] = (clock[of] + last)[over]
        rest = ~over  # whose rates are finite, as is the step
        left[under_way[over]] = 0.0
        left[under_way[rest]] = np.maximum(left[under_way[rest]] - rate[rest] * step[rest], 0.0)
        clock[:] = target
        alive = alive[np.isinf(ends[alive]) & (clock[label[alive]] < bound)]
    return ends, bound


def _next(
    begins: np.ndarray, clock: np.ndarray, of: np.ndarray, last: np.ndarray, rules: kernel.RateRules
) -> np.ndarray:  # fmt: skip
    """Returns until when the rates of each set of flows stay constant [sets]. begins: [sets] when the next flow of each
    begins. of: [F], the set of each flow in flight. last: [F] seconds until it ends at its present rate."""
    first, count = np.full(clock.size, np.inf), np.bincount(of, minlength=clock.size)
    np.minimum.at(first, of, last)
    target = np.minimum(clock + first, begins)
    for each in np.flatnonzero(count > rules.exact_flows):
        remaining = last[of == each]
        coarse_step, half = (
            float(np.quantile(remaining, share, method="inverted_cdf")) for share in (rules.coarse, 0.5)
        )
        coarse_step = min(coarse_step, max(float(first[each]), rules.coarse * half))
        target[each] = clock[each] + coarse_step
        if begins[each] < target[each]:
            target[each] = max(float(begins[each]), clock[each] + rules.coarse * coarse_step)
    return target


def group_flows(
    uses: np.ndarray, begin: np.ndarray, work: np.ndarray, most: np.ndarray, capacity: np.ndarray
) -> np.ndarray:  # fmt: skip
    """Returns a label for each flow [F], equal for flows that may share a resource at some time, directly or through
    others."""
    count = np.bincount(uses[uses >= 0], minlength=capacity.size)
    share = np.append(capacity / np.maximum(count, 1), np.inf)
    # A flow never gets less than its share among all flows that use the resource at any time.
    with np.errstate(divide="ignore", invalid="ignore"):
        longest = np.where(work > 0, work / np.minimum(most, share[uses].min(axis=1, initial=np.inf)), 0.0)
    end = begin + longest * (1 + 1e-6)
    while True:
        label = _group_by_times(uses, begin, end)
        # The rates of a large set are not exact, so that its flows may take longer than this bound.
        large = (np.bincount(label) > EXACT_FLOWS)[label] & np.isfinite(end)
        if not large.any():
            return label
        end = np.where(large, np.inf, end)


def _group_by_times(uses: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Returns the labels as `group_flows` does, for flows that are in flight between `begin` and `end`, [F] each."""
    flow, by_end = np.argsort(begin, kind="stable"), np.argsort(end, kind="stable")
    resource = uses[flow].ravel()
    flow = np.repeat(flow, uses.shape[1])[resource >= 0]
    resource = resource[resource >= 0]
    fits_16_bits = resource.size and resource.max() < 1 << 16  # 16-bit numbers are sorted by radix sort
    order = np.argsort(resource.astype(np.uint16) if fits_16_bits else resource, kind="stable")
    flow, resource = flow[order], resource[order]
    rank = np.empty(by_end.size, int)
    rank[by_end] = np.arange(by_end.size)
    # The last end of the flows that began earlier on a resource: a running maximum that restarts with each resource.
    latest = np.maximum.accumulate(resource * by_end.size + rank[flow]) - resource * by_end.size
    linked = (resource[1:] == resource[:-1]) & (begin[flow[1:]] <= end[by_end[latest[:-1]]])
    return connected_components(len(uses), flow[:-1][linked], flow[1:][linked])


def connected_components(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the number of the connected component of each of `count` vertices, with edges between `a` and `b`."""
    label = (_join_labels if kernel.library() is None else kernel.join)(count, a, b)
    is_label = np.zeros(count, bool)
    is_label[label] = True
    found: np.ndarray = (np.cumsum(is_label) - 1)[label]
    return found


def _join_labels(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Does what `kernel.join` does, where there is no C compiler."""
    label = np.arange(count)
    while True:
        of_a, of_b = label[a], label[b]
        if (of_a == of_b).all():
            return label
        low = np.minimum(of_a, of_b)
        np.minimum.at(label, of_a, low)
        np.minimum.at(label, of_b, low)
        while (label != label[label]).any():
            label = label[label]


@dataclass
class FairSharing:
    """A fixed set of flows for which the end times are computed repeatedly, with no other flows in flight."""

    uses: np.ndarray
    """[F, K] int, the resources of each flow; -1 for none."""
    capacity: np.ndarray
    """[R] work per second of each resource."""
    work: np.ndarray
    """[F] work of each flow."""
    most: np.ndarray
    """[F] largest rate of each flow; infinite if only its resources limit it."""
    alone: np.ndarray = field(init=False)
    """[F] seconds that a flow takes on idle resources."""
    _cache: dict[bytes, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = np.append(self.capacity, np.inf)[self.uses]
        alone = np.minimum(self.most, limits.min(axis=1, initial=np.inf))
        with np.errstate(divide="ignore", invalid="ignore"):
            self.alone = np.where(self.work > 0, self.work / alone, 0.0)
        count = np.append(np.bincount(self.uses[self.uses >= 0], minlength=self.capacity.size), 0)
        self._sharing = np.flatnonzero((count[self.uses] > 1).any(axis=1))
        """Flows that share a resource with another flow."""

    def ends(self, begins: np.ndarray, factors: np.ndarray | None = None) -> np.ndarray:
        """Returns when each flow ends [F], for these begin times [F]; both are infinite for a flow that does not take
        place. factors: [F], which multiply the work of each flow."""
        found = begins + (self.alone if factors is None else self.alone * factors)
        own = begins[self._sharing]
        first = own.min(initial=np.inf)
        if np.isinf(first):
            return found
        if factors is not None:
            found[self._sharing] = first + self._simulate(own - first, self.work * factors)
            return found
        pattern = np.round(own - first, 12).tobytes()
        known = self._cache.get(pattern)
        if known is None:
            if len(self._cache) >= CACHED_PATTERNS:
                self._cache.clear()
            known = self._cache[pattern] = self._simulate(own - first, self.work)
        found[self._sharing] = first + known
        return found

    def _simulate(self, begins: np.ndarray, work: np.ndarray) -> np.ndarray:
        ends, present = begins.copy(), np.flatnonzero(np.isfinite(begins))
        flows, fluid = self._sharing[present], Fluid(self.uses.shape[1])
        fluid.add(self.uses[flows], work[flows], self.most[flows], begins[present], present)
        keys, over = fluid.advance(np.inf, self.capacity)
        ends[keys] = over
        return ends
