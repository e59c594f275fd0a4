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
from decentnode.simulate.timeline.one_round import Row, Rules


@dataclass(frozen=True, eq=False)
class State:
    """The state of the nodes between two rounds."""

    round: int
    begin: np.ndarray
    """[N] when each node begins the round."""
    free: np.ndarray
    """[E] when each edge has passed its previous payload."""


class Overlap(Exception):
    """A connection carries transfers of two phases or rounds at the same time: all rounds from `state` on, which is
    before the first round that is not final, must be computed anew."""

    def __init__(self, state: State) -> None:
        super().__init__(state.round)
        self.state = state


class Apart:
    """Computes whole rounds of all nodes at once."""

    def __init__(self, rules: Rules, network: Network, rounds: int | None) -> None:
        """rounds: number of rounds after which nodes stop; None: they never stop."""
        n = rules.compute.num_nodes
        self._rules, self._network, self.rounds = rules, network, rounds
        self._state = State(0, np.zeros(n), np.zeros(0))
        self._present = np.ones(n, bool)
        self._busy = np.zeros(0)
        """Until when each connection, or each machine's cores, are in use."""
        self._not_final: deque[tuple[State, float, Row]] = deque()
        """Rounds whose transfers may be slowed down by later ones: (the state before it, when all its transfers are
        over, its times)."""

    def next(self) -> Row:
        """Returns the times of the next round. Raises Overlap if they would be wrong."""
        while True:
            over = self.rounds is not None and self._state.round >= self.rounds
            if self._not_final and (over or self._not_final[0][1] <= self._state.begin.min()):
                return self._not_final.popleft()[2]
            before = self._state
            world = _Round(self, before)
            row = self._rules.row(world.plan, world.begin, world)
            self._not_final.append((before, world.over if self._judged else -np.inf, row))
            if world.overlaps and self._judged:
                raise Overlap(self._not_final[0][0])
            self._state = State(before.round + 1, row.end, world.free)

    @property
    def _judged(self) -> bool:
        """Whether overlaps are checked. They are not where rounds that depend on each other's transfers cannot be
        computed at all: if who takes part in a round depends on when all others begin it, or if transfers begin within
        the local steps, as in data-parallel training, whose transfers are among all nodes and never overlap."""
        compute = self._rules.compute
        skips = compute.availability is not None and compute.config.when_away == "skip"
        return not skips and self._rules.leaves_after in (0.0, 1.0)

    def take_part(self, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (when each node begins the next round, after waiting for or leaving out those that are away; which
        nodes take part in it), each [N]."""
        availability = self._rules.compute.availability
        if availability is None:
            return begin, self._present
        if self._rules.compute.config.when_away == "wait":
            return self._rules.begins(begin), self._present
        # Presence is determined at the same time for all nodes: when the median node begins the round.
        now = float(np.median(begin[self._present]))
        times = np.where(self._present, begin, np.maximum(begin, now))
        present = availability.present(times)
        if not present.any():
            back = availability.returns(np.maximum(times, now))
            present = back <= back.min()
            times = np.where(present, back, times)
        self._present = present
        return times, present

    # -- called by a round

    def used(self, what: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> bool:
        """Records that resources are in use between `begins` and `ends` [F]. what: [F, K] int, the resources, -1 for
        none. Returns whether one of them was already in use at that time."""
        there = (ends > begins) & np.isfinite(begins)
        what, begins, ends = what[there], begins[there], ends[there]
        if what.size and what.max() >= self._busy.size:
            self._busy = np.append(self._busy, np.zeros(int(what.max()) + 1))
        busy = np.append(self._busy, -np.inf)  # index -1 stands for no resource
        found = bool((busy[what] > (begins + EQUAL * (1 + np.abs(begins)))[:, None]).any())
        for column in what.T:
            np.maximum.at(busy, column, ends)
        self._busy = busy[:-1]
        return found


class _Round:
    """The `World` of one round."""

    def __init__(self, apart: Apart, before: State) -> None:
        self._apart, self._rules, self._network = apart, apart._rules, apart._network
        self.begin, present = apart.take_part(before.begin)
        self.plan = self._rules.plan(before.round, present)
        self.free, self.over, self.overlaps = before.free, -np.inf, False

    def steps(self, begins: np.ndarray) -> np.ndarray:
        compute = self._rules.compute
        ends = compute.ends(begins, self.plan.seconds)
        if compute.config.cores is not None:
            self._use(compute.machine_of[:, None], begins, ends)
        return ends

    def _use(self, what: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        self.overlaps |= self._apart.used(what, begins, ends)
        self.over = max(self.over, float(ends.max(initial=-np.inf, where=np.isfinite(ends) & (what >= 0).any(axis=1))))

    def exchange(self, phase: int, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        transfers = self.plan.phases[phase]
        ways, there = self._network.ways(transfers), self.plan.there(transfers)
        free = np.append(self.free, np.zeros(self._network.num_edges - self.free.size))
        begins = transfers.begins(np.where(self.plan.present, ready, -np.inf))
        begins = np.where(there, np.maximum(begins, free[ways.edges]), np.inf)
        passed = ways.sharing.ends(begins, self._network.factors(self.plan.round, phase, begins.size))
        self._use(self._rules.resources(ways), begins, passed)
        arrived = transfers.ends(passed + ways.latency, there)
        free[ways.edges[there]] = arrived[there]
        self.free = free
        return arrived, arrived
