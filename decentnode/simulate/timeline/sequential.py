"""Computes one round after the other, as if the transfers of one phase of one round shared connections only with each
other.

This is exact while no connection carries transfers of two phases or rounds at the same time, which is checked for every
round.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from decentnode.simulate.timeline.fair import EQUAL
from decentnode.simulate.timeline.network import Network
from decentnode.simulate.timeline.one_round import RoundSchedule, TimeLineRow


@dataclass(frozen=True, eq=False)
class RoundState:
    """The state of the nodes between two rounds."""

    round: int
    begin: np.ndarray
    """[N] when each node begins the round."""
    free: np.ndarray
    """[E] when each edge has passed its previous payload."""


class Overlap(Exception):
    """A connection carries transfers of two phases or rounds at the same time: all rounds from `state` on, which is
    before the first round that is not final, must be computed anew."""

    def __init__(self, state: RoundState) -> None:
        super().__init__(state.round)
        self.state = state


class SequentialRounds:
    """Computes whole rounds of all nodes at once."""

    def __init__(self, schedule: RoundSchedule, network: Network, rounds: int | None) -> None:
        """rounds: number of rounds after which nodes stop; None: they never stop."""
        n = schedule.compute.num_nodes
        self._schedule, self._network, self.rounds = schedule, network, rounds
        self._state = RoundState(0, np.zeros(n), np.zeros(0))
        self._present = np.ones(n, bool)
        self._busy_until = np.zeros(0)
        """Until when each connection, or each machine's cores, are in use."""
        self._provisional: deque[tuple[RoundState, float, TimeLineRow]] = deque()
        """Rounds whose transfers may be slowed down by later ones: (the state before it, when all its transfers are
        over, its times)."""

    def next(self) -> TimeLineRow:
        """Returns the times of the next round. Raises Overlap if they would be wrong."""
        while True:
            over = self.rounds is not None and self._state.round >= self.rounds
            if self._provisional and (over or self._provisional[0][1] <= self._state.begin.min()):
                return self._provisional.popleft()[2]
            before = self._state
            timing = _SequentialRound(self, before)
            row = self._schedule.row(timing.plan, timing.begin, timing)
            self._provisional.append((before, timing.over if self._checks_overlaps else -np.inf, row))
            if timing.overlaps and self._checks_overlaps:
                raise Overlap(self._provisional[0][0])
            self._state = RoundState(before.round + 1, row.end, timing.free)

    @property
    def _checks_overlaps(self) -> bool:
        """Whether overlaps are checked. They are not where rounds that depend on each other's transfers cannot be
        computed at all: if who takes part in a round depends on when all others begin it, or if transfers begin within
        the local steps, as in data-parallel training, whose transfers are among all nodes and never overlap."""
        compute = self._schedule.compute
        skips = compute.availability is not None and compute.config.when_away == "skip"
        return not skips and self._schedule.leaves_after in (0.0, 1.0)

    def next_participants(self, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (when each node begins the next round, after waiting for or leaving out those that are away; which
        nodes take part in it), each [N]."""
        availability = self._schedule.compute.availability
        if availability is None:
            return begin, self._present
        if self._schedule.compute.config.when_away == "wait":
            return self._schedule.begins(begin), self._present
        # A participant of the last round must be present when it begins this one; a node that was left out, when the
        # median participant begins it, or when its own last round ended if that is later.
        now = float(np.median(begin[self._present]))
        times = np.where(self._present, begin, np.maximum(begin, now))
        present = availability.present(times)
        if not present.any():
            back = availability.next_available(np.maximum(times, now))
            present = back <= back.min()
            times = np.where(present, back, times)
        self._present = present
        return times, present

    # -- called by a round

    def occupy(self, resources: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> bool:
        """Records that resources are in use between `begins` and `ends` [F]. resources: [F, K] int, the resources, -1
        for none. Returns whether one of them was already in use at that time."""
        is_used = (ends > begins) & np.isfinite(begins)
        resources, begins, ends = resources[is_used], begins[is_used], ends[is_used]
        if resources.size and resources.max() >= self._busy_until.size:
            self._busy_until = np.append(self._busy_until, np.zeros(int(resources.max()) + 1))
        busy_until = np.append(self._busy_until, -np.inf)  # index -1 stands for no resource
        found = bool((busy_until[resources] > (begins + EQUAL * (1 + np.abs(begins)))[:, None]).any())
        for column in resources.T:
            np.maximum.at(busy_until, column, ends)
        self._busy_until = busy_until[:-1]
        return found


class _SequentialRound:
    """The `RoundTiming` of one round."""

    def __init__(self, rounds: SequentialRounds, before: RoundState) -> None:
        self._rounds, self._schedule, self._network = rounds, rounds._schedule, rounds._network
        self.begin, present = rounds.next_participants(before.begin)
        self.plan = self._schedule.plan(before.round, present)
        self.free, self.over, self.overlaps = before.free, -np.inf, False

    def steps(self, begins: np.ndarray) -> np.ndarray:
        compute = self._schedule.compute
        ends = compute.ends(begins, self.plan.seconds)
        if compute.config.cores is not None:
            self._occupy(compute.machine_of[:, None], begins, ends)
        return ends

    def _occupy(self, resources: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        self.overlaps |= self._rounds.occupy(resources, begins, ends)
        is_finite = np.isfinite(ends) & (resources >= 0).any(axis=1)
        self.over = max(self.over, float(ends.max(initial=-np.inf, where=is_finite)))

    def exchange(self, phase: int, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        transfers = self.plan.phases[phase]
        routes, takes_place = self._network.routes(transfers), self.plan.takes_place(transfers)
        free = np.append(self.free, np.zeros(self._network.num_edges - self.free.size))
        begins = transfers.begins(np.where(self.plan.present, ready, -np.inf))
        begins = np.where(takes_place, np.maximum(begins, free[routes.edges]), np.inf)
        passed = routes.sharing.ends(begins, self._network.factors(self.plan.round, phase, begins.size))
        self._occupy(self._schedule.resources(routes), begins, passed)
        arrived = transfers.ends(passed + routes.latency, takes_place)
        free[routes.edges[takes_place]] = arrived[takes_place]
        self.free = free
        return arrived, arrived
