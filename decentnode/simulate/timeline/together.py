"""Simulates all rounds in progress at once: transfers share connections with all others that use them at that time.

Time advances in steps. All flows whose begin is known are given to `Fluid`, which may then advance as far as nothing
else can begin: until the first node that waits for something could send again, or else to the next event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from decentnode.simulate.timeline.apart import State
from decentnode.simulate.timeline.fluid import Fluid
from decentnode.simulate.timeline.network import Network, Transfers, Ways
from decentnode.simulate.timeline.one_round import Plan, Row, Rules

AHEAD = 64
"""Largest number of open rounds if nodes never stop, because some nodes may not wait for any other."""


class _Sent:
    """The transfers of one phase of an open round."""

    def __init__(self, transfers: Transfers, ways: Ways, resources: np.ndarray, factors: np.ndarray | None) -> None:
        count = transfers.source.size
        self.transfers, self.ways, self.resources = transfers, ways, resources
        self.factors = np.ones(count) if factors is None else factors
        self.turn = np.zeros(count, int)
        """Number of payloads that pass the edge before."""
        self.begins, self.passed = np.full(count, np.inf), np.full(count, np.inf)
        """[F] when the first byte, and the last byte, passes the edge; infinite if not known."""
        self.to_begin = self.to_end = np.arange(count)
        """Indices of the transfers that have not begun, and of those whose edge is not free again."""
        self.least = ways.alone * self.factors
        """[F] seconds from the first byte to the last on idle connections."""
        self.alone: np.ndarray = resources.max(axis=1, initial=-1) < 0
        """[F] whether they share no connection with other edges."""

    def arrived(self, passed: np.ndarray) -> np.ndarray:
        return self.transfers.ends(passed + self.ways.latency, np.ones(passed.size, bool))


@dataclass(eq=False)
class _Open:
    """A round that some node is in, or will be in next."""

    plan: Plan
    sent: dict[int, _Sent]
    """By phase that has transfers."""
    begin: np.ndarray
    """[N] infinite for nodes that are not known to have begun it; likewise in the other arrays."""
    steps: np.ndarray
    """[N] when the local steps have had the core seconds that they need."""
    steps_began: np.ndarray
    keys: dict[int, int] = field(default_factory=dict)
    """By phase, and -1 for local steps: the key of the first flow in `Fluid`."""
    row: Row | None = None
    """The times, as far as known."""
    changed: bool = True
    """Whether more is known than when `row` was computed."""
    held: float = np.inf
    """When the first transfer begins of those that wait for an edge that is used by earlier rounds, provided that the
    edge is free by then; infinite if none waits."""
    earliest: float = -np.inf
    """A lower bound for the begin of further transfers, besides those that are known, of nodes that are in this
    round."""
    fresh: bool = False
    """Whether `earliest` takes into account everything that is known."""

    @cached_property
    def is_busy(self) -> bool:
        """Whether its transfers take compute from their ends while they are in flight."""
        return any(each.transfers.are_busy for each in self.sent.values())

    @property
    def is_over(self) -> bool:
        ended = self.row is not None and bool(np.isfinite(self.row.end).all())
        return ended and not any(each.to_end.size for each in self.sent.values())


class Together:
    """Computes rounds whose nodes are not in step with each other."""

    def __init__(self, rules: Rules, network: Network, state: State, rounds: int | None) -> None:
        """state: the state from which to start. rounds: number of rounds after which nodes stop; None: they never
        stop."""
        self._rules, self._network, self._rounds = rules, network, rounds
        self.n = rules.compute.num_nodes
        self._everybody = np.ones(self.n, bool)
        self.fluid = Fluid(5)
        self.free = state.free.copy()
        self.passed = np.zeros(self.free.size, int)
        """[E] number of payloads that each edge has passed."""
        self.lines: list[deque[_Open]] = [deque() for _ in self.free]
        """For each edge, the rounds of the payloads that it has not passed yet, in order."""
        self._queued = np.zeros(self.free.size, int)
        self._named = 0
        """Number of keys of flows that have been given out."""
        self._keys: list[int] = []
        self._owners: list[tuple[_Open, int]] = []
        """The round and phase (-1: local steps) to which the flows from each key in `_keys` on belong."""
        self._open: list[_Open] = []
        self._opened(state.round, rules.begins(state.begin))

    def next(self) -> Row:
        """Returns the times of the next round."""
        while True:
            self._settle()
            first = self._open[0]
            if first.is_over:
                assert first.row is not None
                del self._open[0]
                if self._open:  # there is room for another round after it
                    self._open[-1].changed = True
                while self._owners and self._owners[0][0] is first:
                    del self._owners[0], self._keys[0]
                return first.row
            self._advance()

    def _is_last(self, round: int) -> bool:
        return self._rounds is not None and round + 1 >= self._rounds

    # -- what is known

    def _opened(self, round: int, begin: np.ndarray) -> None:
        plan, sent = self._rules.plan(round, self._everybody), {}
        for phase, transfers in enumerate(plan.phases):
            if not transfers.source.size:
                continue
            ways = self._network.ways(transfers)
            more = self._network.num_edges - self.free.size
            self.free = np.append(self.free, np.zeros(more))
            self.passed, self._queued = (np.append(each, np.zeros(more, int)) for each in (self.passed, self._queued))
            self.lines += (deque[_Open]() for _ in range(more))
            factors = self._network.factors(round, phase, transfers.source.size)
            each = sent[phase] = _Sent(transfers, ways, self._rules.resources(ways), factors)
            each.turn = self._queued[ways.edges]
            self._queued[ways.edges] += 1
        nobody = np.full(self.n, np.inf)
        found = _Open(plan, sent, begin, nobody.copy(), nobody.copy())
        self._open.append(found)
        for each in sent.values():
            for edge in each.ways.edges.tolist():
                self.lines[edge].append(found)
        phases = [*([-1] if self._rules.core_resources else []), *sent]
        for phase in phases:
            found.keys[phase] = self._named
            self._keys.append(self._named)
            self._owners.append((found, phase))
            self._named += self.n if phase < 0 else sent[phase].begins.size

    def _settle(self) -> None:
        """Computes everything that follows from what is known."""
        index = 0
        while index < len(self._open):
            each = self._open[index]
            if each.changed:
                each.changed = each.fresh = False
                each.earliest = -np.inf
                world = _Known(self, each)
                each.row = self._rules.row(each.plan, each.begin, world)
                each.held = world.held
                self._go_on(index, each.row.end)
            index += 1

    def _go_on(self, index: int, end: np.ndarray) -> None:
        """Lets nodes that have ended a round begin the next one."""
        here = self._open[index]
        if self._is_last(here.plan.round) or not np.isfinite(end).any():
            return
        begin = self._rules.begins(end)
        if index + 1 == len(self._open):
            if self._rounds is not None or len(self._open) < AHEAD:
                self._opened(here.plan.round + 1, begin)
        elif (begin != self._open[index + 1].begin).any():
            self._open[index + 1].begin, self._open[index + 1].changed = begin, True

    # -- time advances

    def _advance(self) -> None:
        until = self._until()
        capacity = self._network.capacity
        if (cores := self._rules.core_resources) > 0:
            capacity = np.append(np.full(cores, self._rules.compute.config.cores), capacity)
        keys, ends = self.fluid.advance(until, capacity)
        owner = np.searchsorted(self._keys, keys, "right") - 1
        for at in np.unique(owner).tolist():
            (round, phase), own = self._owners[at], owner == at
            flows = keys[own] - self._keys[at]
            (round.steps if phase < 0 else round.sent[phase].passed)[flows] = ends[own]
            round.changed = True
        for each in self._open:
            each.fresh = False
            each.changed |= each.is_busy

    def _until(self) -> float:
        """Returns the time before which nothing begins that is not known yet."""
        now = self.fluid.now
        if any(each.held <= now for each in self._open):
            return now
        while True:
            first = min(self._open, key=lambda each: each.earliest)
            if first.fresh:
                return first.earliest
            first.earliest, first.fresh = self._earliest(first), True

    def _earliest(self, each: _Open) -> float:
        assert each.row is not None
        within = np.isfinite(each.begin) & np.isinf(each.row.end)
        world = _Least(self, each)
        end = self._rules.row(each.plan, each.begin, world).end
        found = world.earliest
        last = self._is_last(each.plan.round)
        if within.any() and not last:
            found = min(found, float((end + self._rules.least_gap(each.plan.round + 1))[within].min()))
        if each is self._open[-1] and not last:  # the round after it is not opened yet
            found = min(found, float(each.row.end.min()))
        return found


class _Known:
    """The `World` of an open round with what is known. Starts the transfers and steps that can begin."""

    def __init__(self, together: Together, round: _Open) -> None:
        self._all, self._round = together, round
        self.held = np.inf

    def steps(self, begins: np.ndarray) -> np.ndarray:
        all_, round, known = self._all, self._round, np.isfinite(begins)
        compute = all_._rules.compute
        seconds = round.plan.seconds
        if compute.config.cores is not None:
            new = np.flatnonzero(known & np.isinf(round.steps_began))
            round.steps_began[new] = begins[new]
            none = new[seconds[new] == 0]
            round.steps[none] = begins[none]
            new = new[seconds[new] > 0]
            all_.fluid.add(compute.machine_of[new, None], seconds[new], np.ones(new.size), begins[new],
                           new + round.keys[-1])  # fmt: skip
            known = np.isfinite(round.steps)
            seconds = np.where(known, round.steps - np.where(known, begins, 0.0), 0.0)
        return np.where(known, compute.worked(np.where(known, begins, 0.0), seconds), np.inf)

    def exchange(self, phase: int, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        all_, sent = self._all, self._round.sent[phase]
        edges = sent.ways.edges
        ready_at = sent.transfers.begins(ready)
        come = np.isfinite(ready_at[sent.to_begin])
        waiting = sent.to_begin[come]
        turn: np.ndarray = all_.passed[edges[waiting]] == sent.turn[waiting]
        new, held = waiting[turn], waiting[~turn]
        self.held = min(self.held, float(ready_at[held].min(initial=np.inf)))
        if new.size:
            sent.to_begin = np.sort(np.append(sent.to_begin[~come], held))
            begins = sent.begins[new] = np.maximum(ready_at[new], all_.free[edges[new]])
            alone = sent.alone[new]
            sent.passed[new[alone]] = begins[alone] + sent.least[new[alone]]
            shared, begins = new[~alone], begins[~alone]
            all_.fluid.add(sent.resources[shared], sent.transfers.sizes[shared] * sent.factors[shared],
                           sent.ways.sharing.most[shared], begins, shared + self._round.keys[phase])  # fmt: skip
        arrived = sent.arrived(sent.passed)
        there: np.ndarray = np.isfinite(arrived[sent.to_end])
        if there.any():
            over, sent.to_end = sent.to_end[there], sent.to_end[~there]
            all_.free[edges[over]] = arrived[over]
            all_.passed[edges[over]] += 1
            for edge in edges[over].tolist():
                all_.lines[edge].popleft()
                following = next(iter(all_.lines[edge]), self._round)
                following.changed |= following is not self._round and following.held < np.inf
        if not sent.transfers.are_busy:
            return arrived, arrived
        return arrived, sent.arrived(_least_passed(sent, all_.fluid.now))


class _Least:
    """The `World` of an open round in which everything that is not known happens as early as possible."""

    def __init__(self, together: Together, round: _Open) -> None:
        self._all, self._round = together, round
        self.earliest = np.inf
        """The earliest begin of what has not begun."""

    def steps(self, begins: np.ndarray) -> np.ndarray:
        all_, round = self._all, self._round
        compute = all_._rules.compute
        if compute.config.cores is not None:
            self.earliest = min(self.earliest, float(begins.min(initial=np.inf, where=np.isinf(round.steps_began))))
        known = np.isfinite(begins)
        found = np.where(known, compute.worked(np.where(known, begins, 0.0), round.plan.seconds), np.inf)
        if compute.config.cores is not None:
            sure = np.isfinite(round.steps)
            begun = np.where(sure, round.steps_began, 0.0)
            found = np.where(sure, compute.worked(begun, np.where(sure, round.steps - begun, 0.0)), found)
        return found

    def exchange(self, phase: int, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        all_, sent = self._all, self._round.sent[phase]
        edges = sent.ways.edges
        free = np.where(all_.passed[edges] == sent.turn, all_.free[edges], all_.fluid.now)
        begins = np.maximum(sent.transfers.begins(ready), free)
        later = np.isinf(sent.begins)
        self.earliest = min(self.earliest, float(begins.min(initial=np.inf, where=later)))
        arrived = sent.arrived(np.where(later, begins + sent.least, _least_passed(sent, all_.fluid.now)))
        return arrived, arrived


def _least_passed(sent: _Sent, now: float) -> np.ndarray:
    """Returns a lower bound of when transfers have passed [F]."""
    known = np.isfinite(sent.passed)
    return np.where(known, sent.passed, np.maximum(sent.begins + sent.least, now))
