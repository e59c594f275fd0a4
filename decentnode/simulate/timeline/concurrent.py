"""Simulates all rounds in progress at once: transfers share connections with all others that use them at that time.

Time advances in steps. All flows whose begin is known are given to `Fluid`, which may then advance for as long as
nothing else can begin: until the first node that waits for something could send again, or else to the next event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from decentnode.simulate.timeline.fluid import Fluid
from decentnode.simulate.timeline.network import Network, Routes, Transfers
from decentnode.simulate.timeline.one_round import PlannedRound, RoundSchedule, TimeLineRow
from decentnode.simulate.timeline.sequential import RoundState

MAX_OPEN_ROUNDS = 64
"""Largest number of open rounds if nodes never stop, because some nodes may not wait for any other."""


class _PhaseTransfers:
    """The transfers of one phase of an open round."""

    def __init__(self, transfers: Transfers, routes: Routes, resources: np.ndarray, factors: np.ndarray | None) -> None:
        count = transfers.source.size
        self.transfers, self.routes, self.resources = transfers, routes, resources
        self.factors = np.ones(count) if factors is None else factors
        self.position = np.zeros(count, int)
        """Number of payloads that pass the edge before."""
        self.begins, self.passed = np.full(count, np.inf), np.full(count, np.inf)
        """[F] when the first byte, and the last byte, passes the edge; infinite if not known."""
        self.waiting = self.unfinished = np.arange(count)
        """Indices of the transfers that have not begun, and of those whose edge is not free again."""
        self.least_seconds = routes.alone * self.factors
        """[F] seconds from the first byte to the last on idle connections."""
        self.is_exclusive: np.ndarray = resources.max(axis=1, initial=-1) < 0
        """[F] whether they share no connection with other edges."""

    def arrived(self, passed: np.ndarray) -> np.ndarray:
        return self.transfers.ends(passed + self.routes.latency, np.ones(passed.size, bool))


@dataclass(eq=False)
class _OpenRound:
    """A round that some node is in, or will be in next."""

    plan: PlannedRound
    sent: dict[int, _PhaseTransfers]
    """By phase that has transfers."""
    begin: np.ndarray
    """[N] infinite for nodes that are not known to have begun it; likewise in the other arrays."""
    steps: np.ndarray
    """[N] when the local steps have had the core seconds that they need."""
    steps_began: np.ndarray
    keys: dict[int, int] = field(default_factory=dict)
    """By phase, and -1 for local steps: the key of the first flow in `Fluid`."""
    row: TimeLineRow | None = None
    """The times, as far as known."""
    has_news: bool = True
    """Whether more is known than when `row` was computed."""
    blocked_until: float = np.inf
    """When the first transfer begins of those that wait for an edge that is used by earlier rounds, provided that the
    edge is free by then; infinite if none waits."""
    earliest: float = -np.inf
    """A lower bound for the begin of further transfers, besides those that are known, of nodes that are in this
    round."""
    is_earliest_current: bool = False
    """Whether `earliest` takes into account everything that is known."""

    @cached_property
    def is_busy(self) -> bool:
        """Whether its transfers take compute from their ends while they are in flight."""
        return any(each.transfers.take_compute for each in self.sent.values())

    @property
    def is_over(self) -> bool:
        ended = self.row is not None and bool(np.isfinite(self.row.end).all())
        return ended and not any(each.unfinished.size for each in self.sent.values())


class ConcurrentRounds:
    """Computes rounds whose nodes are not in step with each other."""

    def __init__(self, schedule: RoundSchedule, network: Network, state: RoundState, rounds: int | None) -> None:
        """state: the state from which to start. rounds: number of rounds after which nodes stop; None: they never
        stop."""
        self._schedule, self._network, self._rounds = schedule, network, rounds
        self.num_nodes = schedule.compute.num_nodes
        self._all_present = np.ones(self.num_nodes, bool)
        self.fluid = Fluid(5)
        self.free = state.free.copy()
        self.passed = np.zeros(self.free.size, int)
        """[E] number of payloads that each edge has passed."""
        self.edge_queues: list[deque[_OpenRound]] = [deque() for _ in self.free]
        """For each edge, the rounds of the payloads that it has not passed yet, in order."""
        self._queued = np.zeros(self.free.size, int)
        self._num_keys = 0
        """Number of keys of flows that have been given out."""
        self._keys: list[int] = []
        self._key_owners: list[tuple[_OpenRound, int]] = []
        """The round and phase (-1: local steps) to which the flows from each key in `_keys` on belong."""
        self._open_rounds: list[_OpenRound] = []
        self._open_round(state.round, schedule.begins(state.begin))

    def next(self) -> TimeLineRow:
        """Returns the times of the next round."""
        while True:
            self._compute_known()
            first = self._open_rounds[0]
            if first.is_over:
                assert first.row is not None
                del self._open_rounds[0]
                if self._open_rounds:  # there is room for another round after it
                    self._open_rounds[-1].has_news = True
                while self._key_owners and self._key_owners[0][0] is first:
                    del self._key_owners[0], self._keys[0]
                return first.row
            self._advance()

    def _is_last(self, round: int) -> bool:
        return self._rounds is not None and round + 1 >= self._rounds

    # -- what is known

    def _open_round(self, round: int, begin: np.ndarray) -> None:
        plan, sent = self._schedule.plan(round, self._all_present), {}
        for phase, transfers in enumerate(plan.phases):
            if not transfers.source.size:
                continue
            routes = self._network.routes(transfers)
            more = self._network.num_edges - self.free.size
            self.free = np.append(self.free, np.zeros(more))
            self.passed, self._queued = (np.append(each, np.zeros(more, int)) for each in (self.passed, self._queued))
            self.edge_queues += (deque[_OpenRound]() for _ in range(more))
            factors = self._network.factors(round, phase, transfers.source.size)
            each = sent[phase] = _PhaseTransfers(transfers, routes, self._schedule.resources(routes), factors)
            each.position = self._queued[routes.edges]
            self._queued[routes.edges] += 1
        nobody = np.full(self.num_nodes, np.inf)
        found = _OpenRound(plan, sent, begin, nobody.copy(), nobody.copy())
        self._open_rounds.append(found)
        for each in sent.values():
            for edge in each.routes.edges.tolist():
                self.edge_queues[edge].append(found)
        phases = [*([-1] if self._schedule.core_resources else []), *sent]
        for phase in phases:
            found.keys[phase] = self._num_keys
            self._keys.append(self._num_keys)
            self._key_owners.append((found, phase))
            self._num_keys += self.num_nodes if phase < 0 else sent[phase].begins.size

    def _compute_known(self) -> None:
        """Computes everything that follows from what is known."""
        index = 0
        while index < len(self._open_rounds):
            each = self._open_rounds[index]
            if each.has_news:
                each.has_news = each.is_earliest_current = False
                each.earliest = -np.inf
                timing = _KnownTimes(self, each)
                each.row = self._schedule.row(each.plan, each.begin, timing)
                each.blocked_until = timing.blocked_until
                self._begin_next_round(index, each.row.end)
            index += 1

    def _begin_next_round(self, index: int, end: np.ndarray) -> None:
        """Lets nodes that have ended a round begin the next one."""
        current = self._open_rounds[index]
        if self._is_last(current.plan.round) or not np.isfinite(end).any():
            return
        begin = self._schedule.begins(end)
        if index + 1 == len(self._open_rounds):
            if self._rounds is not None or len(self._open_rounds) < MAX_OPEN_ROUNDS:
                self._open_round(current.plan.round + 1, begin)
        elif (begin != self._open_rounds[index + 1].begin).any():
            self._open_rounds[index + 1].begin, self._open_rounds[index + 1].has_news = begin, True

    # -- time advances

    def _advance(self) -> None:
        until = self._safe_time()
        capacity = self._network.capacity
        if (cores := self._schedule.core_resources) > 0:
            capacity = np.append(np.full(cores, self._schedule.compute.config.cores), capacity)
        keys, ends = self.fluid.advance(until, capacity)
        owner = np.searchsorted(self._keys, keys, "right") - 1
        for at in np.unique(owner).tolist():
            (round, phase), own = self._key_owners[at], owner == at
            flows = keys[own] - self._keys[at]
            (round.steps if phase < 0 else round.sent[phase].passed)[flows] = ends[own]
            round.has_news = True
        for each in self._open_rounds:
            each.is_earliest_current = False
            each.has_news |= each.is_busy

    def _safe_time(self) -> float:
        """Returns the time before which nothing begins that is not known yet."""
        now = self.fluid.now
        if any(each.blocked_until <= now for each in self._open_rounds):
            return now
        while True:
            first = min(self._open_rounds, key=lambda each: each.earliest)
            if first.is_earliest_current:
                return first.earliest
            first.earliest, first.is_earliest_current = self._earliest(first), True

    def _earliest(self, each: _OpenRound) -> float:
        assert each.row is not None
        within = np.isfinite(each.begin) & np.isinf(each.row.end)
        timing = _EarliestTimes(self, each)
        end = self._schedule.row(each.plan, each.begin, timing).end
        found = timing.earliest
        last = self._is_last(each.plan.round)
        if within.any() and not last:
            found = min(found, float((end + self._schedule.min_delay(each.plan.round + 1))[within].min()))
        if each is self._open_rounds[-1] and not last:  # the round after it is not opened yet
            found = min(found, float(each.row.end.min()))
        return found


class _KnownTimes:
    """The `RoundTiming` of an open round with what is known. Starts the transfers and steps that can begin."""

    def __init__(self, rounds_in_progress: ConcurrentRounds, round: _OpenRound) -> None:
        self._rounds_in_progress, self._round = rounds_in_progress, round
        self.blocked_until = np.inf

    def steps(self, begins: np.ndarray) -> np.ndarray:
        rounds, round, known = self._rounds_in_progress, self._round, np.isfinite(begins)
        compute = rounds._schedule.compute
        seconds = round.plan.seconds
        if compute.config.cores is not None:
            new = np.flatnonzero(known & np.isinf(round.steps_began))
            round.steps_began[new] = begins[new]
            none = new[seconds[new] == 0]
            round.steps[none] = begins[none]
            new = new[seconds[new] > 0]
            rounds.fluid.add(compute.machine_of[new, None], seconds[new], np.ones(new.size), begins[new],
                           new + round.keys[-1])  # fmt: skip
            known = np.isfinite(round.steps)
            seconds = np.where(known, round.steps - np.where(known, begins, 0.0), 0.0)
        return np.where(known, compute.finish_work(np.where(known, begins, 0.0), seconds), np.inf)

    def exchange(self, phase: int, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rounds, sent = self._rounds_in_progress, self._round.sent[phase]
        edges = sent.routes.edges
        ready_at = sent.transfers.begins(ready)
        is_ready = np.isfinite(ready_at[sent.waiting])
        waiting = sent.waiting[is_ready]
        is_next: np.ndarray = rounds.passed[edges[waiting]] == sent.position[waiting]
        new, blocked = waiting[is_next], waiting[~is_next]
        self.blocked_until = min(self.blocked_until, float(ready_at[blocked].min(initial=np.inf)))
        if new.size:
            sent.waiting = np.sort(np.append(sent.waiting[~is_ready], blocked))
            begins = sent.begins[new] = np.maximum(ready_at[new], rounds.free[edges[new]])
            alone = sent.is_exclusive[new]
            sent.passed[new[alone]] = begins[alone] + sent.least_seconds[new[alone]]
            shared, begins = new[~alone], begins[~alone]
            rounds.fluid.add(sent.resources[shared], sent.transfers.sizes[shared] * sent.factors[shared],
                           sent.routes.sharing.most[shared], begins, shared + self._round.keys[phase])  # fmt: skip
        arrived = sent.arrived(sent.passed)
        is_over: np.ndarray = np.isfinite(arrived[sent.unfinished])
        if is_over.any():
            finished, sent.unfinished = sent.unfinished[is_over], sent.unfinished[~is_over]
            rounds.free[edges[finished]] = arrived[finished]
            rounds.passed[edges[finished]] += 1
            for edge in edges[finished].tolist():
                rounds.edge_queues[edge].popleft()
                following = next(iter(rounds.edge_queues[edge]), self._round)
                following.has_news |= following is not self._round and following.blocked_until < np.inf
        if not sent.transfers.take_compute:
            return arrived, arrived
        return arrived, sent.arrived(_earliest_passed(sent, rounds.fluid.now))


class _EarliestTimes:
    """The `RoundTiming` of an open round in which everything that is not known happens as early as possible."""

    def __init__(self, rounds_in_progress: ConcurrentRounds, round: _OpenRound) -> None:
        self._rounds_in_progress, self._round = rounds_in_progress, round
        self.earliest = np.inf
        """The earliest begin of what has not begun."""

    def steps(self, begins: np.ndarray) -> np.ndarray:
        rounds, round = self._rounds_in_progress, self._round
        compute = rounds._schedule.compute
        if compute.config.cores is not None:
            self.earliest = min(self.earliest, float(begins.min(initial=np.inf, where=np.isinf(round.steps_began))))
        known = np.isfinite(begins)
        found = np.where(known, compute.finish_work(np.where(known, begins, 0.0), round.plan.seconds), np.inf)
        if compute.config.cores is not None:
            sure = np.isfinite(round.steps)
            begun = np.where(sure, round.steps_began, 0.0)
            found = np.where(sure, compute.finish_work(begun, np.where(sure, round.steps - begun, 0.0)), found)
        return found

    def exchange(self, phase: int, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rounds, sent = self._rounds_in_progress, self._round.sent[phase]
        edges = sent.routes.edges
        free = np.where(rounds.passed[edges] == sent.position, rounds.free[edges], rounds.fluid.now)
        begins = np.maximum(sent.transfers.begins(ready), free)
        later = np.isinf(sent.begins)
        self.earliest = min(self.earliest, float(begins.min(initial=np.inf, where=later)))
        arrived = sent.arrived(np.where(later, begins + sent.least_seconds, _earliest_passed(sent, rounds.fluid.now)))
        return arrived, arrived


def _earliest_passed(sent: _PhaseTransfers, now: float) -> np.ndarray:
    """Returns a lower bound of when transfers have passed [F]."""
    known = np.isfinite(sent.passed)
    return np.where(known, sent.passed, np.maximum(sent.begins + sent.least_seconds, now))
