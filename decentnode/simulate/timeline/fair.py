"""Transfers, or computations, that share resources: every one gets a max-min fair share at every moment.

A flow is so much work (bytes, CPU seconds) that begins at a given time and passes all its resources at once. Rates are
those of progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2), computed anew whenever a flow begins or
ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

EQUAL = 1e-9
"""Relative difference below which two rates or two times are one."""
EXACT_FLOWS = 256
"""Most flows of one component that are followed exactly, each with its own begin. The rates of larger ones are those
of flows that all begin together, which costs one computation per set of flows and not one per round."""
COARSE = 0.125
"""Share of the flows under way in such a component that end before rates are computed anew."""
REMEMBERED = 64
"""Patterns of begins whose durations are kept: without chance, rounds repeat."""


def fair_rates(uses: np.ndarray, capacity: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Returns the max-min fair rate of each flow [F].

    uses: [F, K] int, the resources of each flow; -1 for none. capacity: [R]. most: [F], the rate that a flow cannot
    exceed by itself. Capacities and `most` may be infinite.
    """
    flows, resources = uses.shape[0], capacity.size
    rates = np.full(flows, np.inf)
    left = np.append(capacity.astype(float), np.inf)  # -1 is the last: no resource
    open_flows = np.arange(flows)
    while open_flows.size:
        taken = uses[open_flows]
        count = np.bincount((taken + 1).ravel(), minlength=resources + 1)[1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.append(np.where(count > 0, left[:-1] / count, np.inf), np.inf)
        limit = np.minimum(most[open_flows], share[taken].min(axis=1, initial=np.inf))
        # A resource that gives each of its flows less than all else would: their rates are final, wherever it is in
        # the order of progressive filling. So are those of flows that no resource slows down.
        least = np.full(resources + 1, np.inf)
        for column in range(taken.shape[1]):
            np.minimum.at(least, taken[:, column], limit)
        final = (least >= share * (1 - EQUAL)) & np.isfinite(share)
        fixed = final[taken].any(axis=1) | (limit >= most[open_flows] * (1 - EQUAL)) | np.isinf(limit)
        rate = limit[fixed]
        rates[open_flows[fixed]] = rate
        finite = np.where(np.isfinite(rate), rate, 0.0)
        for column in range(taken.shape[1]):
            left[:-1] -= np.bincount(taken[fixed, column] + 1, finite, resources + 1)[1:]
        np.maximum(left, 0.0, out=left)
        open_flows = open_flows[~fixed]
    return rates


@dataclass
class _Component:
    """Flows that have resources in common, directly or over others."""

    flows: np.ndarray
    durations: np.ndarray | None = None
    """[flows] of a large component, where all begin together."""


@dataclass
class FairSharing:
    """A fixed set of flows, asked again and again when each ends."""

    uses: np.ndarray
    """[F, K] int, resources of each flow; -1 for none."""
    capacity: np.ndarray
    """[R] work per second."""
    work: np.ndarray
    """[F] of each flow."""
    most: np.ndarray
    """[F] largest rate of each flow; infinite where nothing but resources bounds it."""
    _components: list[_Component] = field(default_factory=list)
    _known: dict[bytes, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounded = np.append(np.isfinite(self.capacity), False)
        self.uses = np.where(bounded[self.uses], self.uses, -1)
        limits = np.append(self.capacity, np.inf)[self.uses]
        alone = np.minimum(self.most, limits.min(axis=1) if self.uses.shape[1] else np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._alone = np.where(self.work > 0, self.work / alone, 0.0)
        """[F] duration of a flow that shares nothing."""
        self._components = [_Component(each) for each in _components(self.uses, self.capacity.size)]

    def ends(self, begins: np.ndarray) -> np.ndarray:
        """Returns when each flow ends [F], for these begins [F]; infinity is the begin and the end of one that is left
        out."""
        found = begins + self._alone
        for each in self._components:
            found[each.flows] = self._shared(each, begins[each.flows])
        return found

    def _shared(self, component: _Component, begins: np.ndarray) -> np.ndarray:
        flows = component.flows
        if flows.size > EXACT_FLOWS:
            if component.durations is None:
                component.durations = self._followed(flows, np.zeros(flows.size), COARSE)
            return begins + component.durations
        first = begins.min()
        if np.isinf(first):
            return begins
        pattern = np.append(flows[0], np.round(begins - first, 12)).tobytes()
        known = self._known.get(pattern)
        if known is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            known = self._known[pattern] = self._followed(flows, begins - first, 0.0)
        return first + known

    def _followed(self, flows: np.ndarray, begins: np.ndarray, coarse: float) -> np.ndarray:
        """Returns when each of these flows ends. coarse: share of the flows under way that end, each in its time,
        before rates are computed anew; 0: after every end."""
        uses, work, most = self.uses[flows], self.work[flows].astype(float), self.most[flows]
        names, uses = np.unique(np.append(uses, -1), return_inverse=True)  # only resources of the component
        uses = uses[:-1].reshape(work.size, -1) - 1
        capacity = self.capacity[names[1:]]
        ends, left = begins.astype(float).copy(), work.copy()
        waiting = np.argsort(begins, kind="stable")
        waiting = waiting[(work[waiting] > 0) & np.isfinite(begins[waiting])]
        active = np.empty(0, int)
        now = 0.0
        while waiting.size or active.size:
            if not active.size:
                now = max(now, begins[waiting[0]])
            arrived = begins[waiting] <= now + EQUAL * (1 + abs(now))
            active, waiting = np.append(active, waiting[arrived]), waiting[~arrived]
            rate = fair_rates(uses[active], capacity, most[active])
            with np.errstate(divide="ignore", invalid="ignore"):
                last = np.where(np.isinf(rate), 0.0, left[active] / rate)
            step = np.quantile(last, coarse, method="inverted_cdf")
            if waiting.size:
                step = min(step, begins[waiting[0]] - now)
            over = last <= step * (1 + EQUAL) + 1e-15
            ends[active[over]] = now + last[over]
            now += step
            left[active] = np.where(np.isinf(rate), 0.0, left[active] - rate * step)
            active = active[~over]
        return ends


def _components(uses: np.ndarray, resources: int) -> list[np.ndarray]:
    """Returns the flows [each] of every component in which a resource has two flows or more."""
    count = np.bincount(uses[uses >= 0].ravel(), minlength=resources)
    shared = np.append(count > 1, False)
    seen = np.where(shared[uses], uses, -1)  # a resource of one flow alone joins nobody
    flows = np.flatnonzero((seen >= 0).any(axis=1)) if uses.shape[1] else np.empty(0, int)
    if not flows.size:
        return []
    seen = seen[flows]
    label = np.append(np.arange(resources), resources)  # of each resource: the lowest that it is joined to
    while True:
        lowest = label[seen].min(axis=1)
        before = label.copy()
        for column in range(seen.shape[1]):
            np.minimum.at(label, seen[:, column], np.where(seen[:, column] >= 0, lowest, resources))
        label[-1] = resources
        if (label == before).all():
            break
    of_flow = label[seen].min(axis=1)
    order = np.argsort(of_flow, kind="stable")
    cuts = np.flatnonzero(np.diff(of_flow[order])) + 1
    return np.split(flows[order], cuts)
