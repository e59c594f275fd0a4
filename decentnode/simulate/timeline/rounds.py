"""Virtual time: when every round begins and ends on every node.

Rounds are computed one after the other (sequential.py) as long as the transfers of one never overlap with those of
another; from the first that do, all rounds in progress are simulated together (concurrent.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.concurrent import ConcurrentRounds
from decentnode.simulate.timeline.network import Network, Transfers
from decentnode.simulate.timeline.one_round import RoundSchedule, TransfersOfRound
from decentnode.simulate.timeline.sequential import Overlap, SequentialRounds


@dataclass(frozen=True)
class TimeLine:
    """Every node's rounds, in virtual seconds since the begin of the first one. Arrays are [rounds, N]."""

    begin: np.ndarray
    steps_began: np.ndarray
    """When the local steps began: at the begin of the round, or, with a server, once its model had arrived."""
    computed: np.ndarray
    """When the local steps were done."""
    end: np.ndarray
    waits_for: np.ndarray
    """int32: the neighbor for whose payload the end of the round waited; -1 if the node's own work took longest."""
    waited: np.ndarray
    """Seconds for which the node waited for payloads and had nothing else to do."""
    present: np.ndarray
    """bool: whether the node took part in the round."""
    asynchronous: bool = False
    """Whether nodes may be in different rounds; the first node that has made all rounds then ends the run."""
    cycle: int = 1
    """The number of rounds after which local steps and exchanges repeat."""

    @property
    def rounds(self) -> int:
        return len(self.end)

    def finished(self) -> np.ndarray:
        """Returns when all nodes had finished each round [rounds]. If they may be in different rounds: when the
        furthest had, and for the last round, when all had finished the round in which they were then."""
        if not self.asynchronous:
            return np.maximum.accumulate(self.end.max(axis=1))
        furthest = self.end.min(axis=1)
        furthest[-1] = np.where(self.end >= furthest[-1], self.end, np.inf).min(axis=0).max()
        return furthest

    def round_seconds(self) -> np.ndarray:
        """Returns the duration of each round, mean over the nodes [rounds]."""
        return np.diff(self.end.mean(axis=1), prepend=0.0)

    def steady_seconds(self) -> float:
        """Returns the mean duration of a round over whole cycles, without at least the first fifth of the rounds, which
        are not typical; of all rounds if they are fewer than two cycles."""
        first = -(-(self.rounds // 5) // self.cycle) * self.cycle
        count = (self.rounds - first) // self.cycle * self.cycle
        if count <= 0:
            first, count = 0, self.rounds
        begin = self.end[first - 1].mean() if first else 0.0
        return float((self.end[first + count - 1].mean() - begin) / count)

    def waits(self, most: int = 10) -> list[tuple[int, int, int, float]]:
        """Returns (node, the neighbor that it waited for, number of rounds, total seconds), sorted by seconds."""
        waiting = np.argwhere(self.waits_for >= 0)
        uids = waiting[:, 1]
        key = uids * self.end.shape[1] + self.waits_for[waiting[:, 0], uids]
        pairs, inverse, count = np.unique(key, return_inverse=True, return_counts=True)
        seconds = np.bincount(inverse, self.waited[waiting[:, 0], uids], pairs.size)
        longest = np.argsort(-seconds, kind="stable")[:most]
        n = self.end.shape[1]
        return [(int(pairs[i] // n), int(pairs[i] % n), int(count[i]), float(seconds[i])) for i in longest]


class Clock:
    """Computes a time line round by round, so that a running simulation can use it."""

    def __init__(
        self, compute: Compute, network: Network, transfers: TransfersOfRound, *, overlapped: bool = False,
        mixes_in_background: bool = True, leaves_after: float | None = None, asynchronous: bool = False,
        steps_before: int = 0, trains: Callable[[int], np.ndarray] | None = None, rounds: int | None = None,
        cycle: int = 1,
    ) -> None:
        """transfers: returning the same objects for the same transfers makes it fast. mixes_in_background: with
        `overlapped`, whether arrivals are mixed during the steps. leaves_after: share of the local steps after which
        the first payloads leave; None: that of the schedule, which is 1, or 0 with `overlapped`. In between, they leave
        piece by piece, and their last byte with the last step, as gradients that are reduced during the backward pass
        do from 1/3 on; such transfers must be among all nodes together. asynchronous: no node waits for arrivals; a
        round consists of the local steps and the mixing of as much as arrives in a synchronous one. steps_before: the
        phase before which the local steps are made; earlier phases start with the round. trains: returns which nodes
        make local steps in a round, bool [N]; None: all. rounds: number of rounds after which nodes stop; None: they
        never stop. cycle: as in `TimeLine`."""
        self.compute, self.network, self.transfers = compute, network, transfers
        self.asynchronous, self.cycle = asynchronous, cycle
        self._schedule = RoundSchedule(
            compute, transfers, overlapped=overlapped, mixes_in_background=mixes_in_background,
            leaves_after=leaves_after, asynchronous=asynchronous, steps_before=steps_before, trains=trains,
        )  # fmt: skip
        self._rounds: SequentialRounds | ConcurrentRounds = SequentialRounds(self._schedule, network, rounds)
        self.round = 0
        """The number of the next round."""
        self.arrivals: tuple[tuple[Transfers, np.ndarray], ...] = ()
        """The transfers of each phase of the last round, and when they arrived [F]."""
        self.over = 0.0
        """When the last transfer of all rounds so far arrived."""

    def stop_after(self, rounds: int) -> None:
        """Makes nodes stop after this many rounds. Must be called before the first step."""
        assert self.round == 0 and isinstance(self._rounds, SequentialRounds)
        self._rounds.rounds = rounds

    def step(self) -> tuple[np.ndarray, ...]:
        """Advances by one round. Returns its times in the order of `TimeLine`'s fields, each [N]."""
        try:
            row = self._rounds.next()
        except Overlap as found:
            assert isinstance(self._rounds, SequentialRounds)
            self._rounds = ConcurrentRounds(self._schedule, self.network, found.state, self._rounds.rounds)
            row = self._rounds.next()
        self.round += 1
        self.arrivals = row.arrivals
        for _, arrived in row.arrivals:
            self.over = max(self.over, float(arrived.max(initial=0.0, where=np.isfinite(arrived))))
        return row.begin, row.steps_began, row.computed, row.end, row.waits_for, row.waited, row.present


def time_line(clock: Clock, rounds: int) -> TimeLine:
    """Returns the time line of a clock that has not made a step. rounds: at least 1, after which nodes stop."""
    clock.stop_after(rounds)
    n = clock.compute.num_nodes
    begin, began, computed, end, waited = (np.empty((rounds, n)) for _ in range(5))
    waits_for, present = np.empty((rounds, n), np.int32), np.empty((rounds, n), bool)
    for r in range(rounds):
        begin[r], began[r], computed[r], end[r], waits_for[r], waited[r], present[r] = clock.step()
    return TimeLine(begin, began, computed, end, waits_for, waited, present, clock.asynchronous, clock.cycle)
