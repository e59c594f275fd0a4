"""Virtual time: begin and end of every round on every node.

Rounds are computed one after the other (apart.py) as long as transfers of one never meet those of another; from the
first that do, all that is under way at once is followed together (together.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decentnode.simulate.timeline.apart import Apart, Overlap
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import Network, Transfers
from decentnode.simulate.timeline.one_round import Rules, TransfersOf
from decentnode.simulate.timeline.together import Together


@dataclass(frozen=True)
class TimeLine:
    """Every node's rounds, in virtual seconds from the begin of the first. Arrays are [rounds, N]."""

    begin: np.ndarray
    steps_began: np.ndarray
    """When the local steps began: with the round, or where a server serves, once its model was there."""
    computed: np.ndarray
    """When the local steps were done."""
    end: np.ndarray
    waits_for: np.ndarray
    """int32: the neighbor whose payload the round's end waited for; -1 where the node's own work was what took so
    long."""
    waited: np.ndarray
    """Seconds that the node waited for payloads, with nothing else to do."""
    present: np.ndarray
    """bool: whether the node took part in the round."""
    asynchronous: bool = False
    """Whether nodes are in rounds of their own; the first that has made all ends the run."""

    @property
    def rounds(self) -> int:
        return len(self.end)

    def finished(self) -> np.ndarray:
        """Returns when all nodes had finished each round [rounds]; where they are in rounds of their own, when the
        furthest had, and for the last round when all had finished the one that they were in then."""
        if not self.asynchronous:
            return np.maximum.accumulate(self.end.max(axis=1))
        furthest = self.end.min(axis=1)
        furthest[-1] = np.where(self.end >= furthest[-1], self.end, np.inf).min(axis=0).max()
        return furthest

    def round_seconds(self) -> np.ndarray:
        """Returns the seconds that each round took, mean over the nodes [rounds]."""
        return np.diff(self.end.mean(axis=1), prepend=0.0)

    def steady_seconds(self) -> float:
        """Returns the mean seconds of a round, without the first fifth of the rounds: the beginning is no typical
        time."""
        first = self.rounds // 5
        begin = self.end[first - 1].mean() if first else 0.0
        return float((self.end[-1].mean() - begin) / (self.rounds - first))

    def waits(self, most: int = 10) -> list[tuple[int, int, int, float]]:
        """Returns (node, the neighbor that it waited for, in how many rounds, seconds in all), by seconds."""
        there = np.argwhere(self.waits_for >= 0)
        uids = there[:, 1]
        key = uids * self.end.shape[1] + self.waits_for[there[:, 0], uids]
        pairs, inverse, count = np.unique(key, return_inverse=True, return_counts=True)
        seconds = np.bincount(inverse, self.waited[there[:, 0], uids], pairs.size)
        best = np.argsort(-seconds, kind="stable")[:most]
        n = self.end.shape[1]
        return [(int(pairs[i] // n), int(pairs[i] % n), int(count[i]), float(seconds[i])) for i in best]


class Clock:
    """Steps a time line round by round, so that a simulation can ask for it as it goes on."""

    def __init__(
        self, compute: Compute, network: Network, transfers: TransfersOf, *, overlapped: bool = False,
        mixes_in_background: bool = True, leaves_after: float | None = None, asynchronous: bool = False,
        steps_before: int = 0, trains: Callable[[int], np.ndarray] | None = None, rounds: int | None = None,
    ) -> None:
        """transfers: the same objects for the same transfers make it fast. mixes_in_background: with `overlapped`,
        whether arrivals are mixed beside the steps. leaves_after: share of the local steps after which the first
        payloads leave, where it is not that of the schedule: 1, with `overlapped` 0. In between they leave piece by
        piece and their last byte with the last step: gradients that are reduced while the backward pass goes on begin
        to leave after 1/3; such transfers must be those of all nodes together. asynchronous: nobody waits for what
        comes; a round has the local steps and the mixing of as much as comes in a synchronous one. steps_before: the
        phase before which the local steps are made; those before it begin with the round. trains: returns who makes
        local steps in a round, bool [N]; everybody when None. rounds: after which nodes stop; None: they go on."""
        self.compute, self.network, self.transfers = compute, network, transfers
        self.asynchronous = asynchronous
        self._rules = Rules(
            compute, transfers, overlapped=overlapped, mixes_in_background=mixes_in_background,
            leaves_after=leaves_after, asynchronous=asynchronous, steps_before=steps_before, trains=trains,
        )  # fmt: skip
        self._rounds: Apart | Together = Apart(self._rules, network, rounds)
        self.round = 0
        """The next one."""
        self.arrivals: tuple[tuple[Transfers, np.ndarray], ...] = ()
        """Of the last step: the transfers of each phase, and when they had arrived [F]."""
        self.over = 0.0
        """When the last transfer of all steps had arrived."""

    def stop_after(self, rounds: int) -> None:
        """Lets nodes make so many rounds. Only before the first step."""
        assert self.round == 0 and isinstance(self._rounds, Apart)
        self._rounds.rounds = rounds

    def step(self) -> tuple[np.ndarray, ...]:
        """Advances one round. Returns what `TimeLine` has of it, in its order, each [N]."""
        try:
            row = self._rounds.next()
        except Overlap as found:
            assert isinstance(self._rounds, Apart)
            self._rounds = Together(self._rules, self.network, found.state, self._rounds.rounds)
            row = self._rounds.next()
        self.round += 1
        self.arrivals = row.arrivals
        for _, arrived in row.arrivals:
            self.over = max(self.over, float(arrived.max(initial=0.0, where=np.isfinite(arrived))))
        return row.begin, row.steps_began, row.computed, row.end, row.waits_for, row.waited, row.present


def time_line(clock: Clock, rounds: int) -> TimeLine:
    """Steps a clock that has made no step and returns what it told. rounds: at least 1, after which nodes stop."""
    clock.stop_after(rounds)
    n = clock.compute.num_nodes
    begin, began, computed, end, waited = (np.empty((rounds, n)) for _ in range(5))
    waits_for, present = np.empty((rounds, n), np.int32), np.empty((rounds, n), bool)
    for r in range(rounds):
        begin[r], began[r], computed[r], end[r], waits_for[r], waited[r], present[r] = clock.step()
    return TimeLine(begin, began, computed, end, waits_for, waited, present, clock.asynchronous)
