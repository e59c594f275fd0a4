"""The recursion of virtual time: begin and end of every round on every node.

Sequential: steps, then the payloads leave, and the round ends when those of all neighbors have been mixed. Overlapped:
payloads leave with the round's begin, and the round ends when both the steps and the mixing are done
(docs/explanation/round.rst). With a server: the model goes down, clients that take part make their steps once they have
it, and what changed comes up. Asynchronous: the round of a node ends when its own work is done, whoever else is where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import Network, Transfers

TransfersOf = Callable[[int], Sequence[Transfers]]
"""The transfers of each phase of a round."""

TAIL_BYTES = 4 << 20
"""Payloads are mixed in chunks of so many bytes as they arrive: only the last one is mixed after the arrival."""


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
        steps_before: int = 0, trains: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """transfers: the same objects for the same transfers make it fast. mixes_in_background: with `overlapped`,
        whether arrivals are mixed beside the steps. leaves_after: share of the local steps after which the first
        payloads leave, where it is not that of the schedule: 1, with `overlapped` 0. In between they leave piece by
        piece and their last byte with the last step: gradients that are reduced while the backward pass goes on begin
        to leave after 1/3. asynchronous: nobody waits for what comes; a round has the local steps and the mixing of as
        much as comes in a synchronous one. steps_before: the phase before which the local steps are made; those before
        it begin with the round. trains: returns who makes local steps in a round, bool [N]; everybody when None."""
        self._steps_before, self._trains = steps_before, trains
        self.compute, self.network = compute, network
        self.transfers = transfers
        self.overlapped, self._background, self.asynchronous = overlapped, mixes_in_background, asynchronous
        self._leaves_after = (0.0 if overlapped else 1.0) if leaves_after is None else leaves_after
        self.now = np.zeros(compute.num_nodes)
        """[N] when each node begins its next round."""
        self.round = 0
        self.arrivals: list[tuple[Transfers, np.ndarray]] = []
        """Of the last step: the transfers of each phase, and when they had arrived [F]."""
        self._present = np.ones(compute.num_nodes, bool)
        self._free: dict[int, tuple[Transfers, np.ndarray]] = {}
        """When each edge has passed the payload before, by its set of transfers."""

    def step(self) -> tuple[np.ndarray, ...]:
        """Advances one round. Returns what `TimeLine` has of it, in its order, each [N]."""
        round, compute = self.round, self.compute
        present = self._take_part()
        begin, self.arrivals = self.now.copy(), []
        works = present if self._trains is None else present & self._trains(round)
        seconds = np.where(works, compute.seconds(round), 0.0)
        phases = list(self.transfers(round))
        first, waits_for, waited = begin, np.full(begin.size, -1, np.int32), np.zeros(begin.size)
        for number, transfers in enumerate(phases[: self._steps_before]):
            if transfers.source.size:
                first, late, wait = self._mixed(transfers, self._exchange(transfers, first, number), first, first)
                waited += wait
                waits_for = np.where(wait > 0, late, waits_for)
        computed = compute.ends(first, seconds)
        ready = computed if self._leaves_after == 1 else begin + self._leaves_after * (computed - begin)
        end, rest = computed, [each for each in phases[self._steps_before :] if each.source.size]
        for number, transfers in enumerate(rest):
            sent = ready if number == 0 else end
            arrived = self._exchange(transfers, sent, self._steps_before + number)
            if number == 0:
                computed = self._slowed(computed, ready, transfers, arrived)
                if 0 < self._leaves_after < 1:
                    arrived = transfers.ends(np.maximum(arrived, computed[transfers.source]))
            end, late, wait = self._mixed(transfers, arrived, end if number else computed, sent)
            waited += wait
            waits_for = np.where(wait > 0, late, waits_for)
        end = np.where(present, end + compute.config.overhead_seconds, end)
        self.now, self.round = end, round + 1
        return begin, first, computed, end, waits_for, waited, present

    def _take_part(self) -> np.ndarray:
        """Returns who takes part in the next round [N], after nodes that are away have come back or been left out."""
        availability = self.compute.availability
        if availability is None:
            return self._present
        if self.compute.config.when_away == "wait":
            self.now = availability.returns(self.now)
            return self._present
        # Presence is judged at one time for all: that at which the typical node begins the round.
        there = self.now[self._present]
        now = float(np.median(there))
        times = np.where(self._present, self.now, np.maximum(self.now, now))
        present = availability.present(times)
        if not present.any():
            back = availability.returns(np.maximum(times, now))
            present = back <= back.min()
            times = np.where(present, back, times)
        self.now, self._present = times, present
        return present

    def _exchange(self, transfers: Transfers, ready: np.ndarray, phase: int) -> np.ndarray:
        """Returns when the transfers have arrived [F]. An edge passes one payload after the other."""
        source, target = transfers.source, transfers.target
        begins = transfers.begins(np.where(self._present, ready, -np.inf))
        known = self._free.get(id(transfers))
        if known is not None:
            begins = np.maximum(begins, np.where(np.isfinite(known[1]), known[1], 0.0))
        if not self._present.all():
            begins = np.where(self._present[source] & self._present[target], begins, np.inf)
        arrived = self.network.arrivals(transfers, begins, self.round, phase)
        if len(self._free) >= 64:
            self._free.clear()
        self._free[id(transfers)] = transfers, arrived
        self.arrivals.append((transfers, arrived))
        return arrived

    @staticmethod
    def _slowed(computed: np.ndarray, ready: np.ndarray, transfers: Transfers, arrived: np.ndarray) -> np.ndarray:
        """Returns when local steps are done [N] beside an exchange that takes a share of each node's compute from
        `ready` [N] until it is over. computed: [N] when they would be done without it."""
        if transfers.joining is None or not transfers.joining.busy_share.any():
            return computed
        left = np.maximum(computed - ready, 0.0)
        until, share = transfers.busy(arrived, computed.size)
        return computed + share * np.minimum(np.maximum(until - ready, 0.0), left / (1 - share))

    def _mixed(
        self, transfers: Transfers, arrived: np.ndarray, computed: np.ndarray, sent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (when each node has mixed what came, for whom it waited, seconds waited), each [N]. computed: [N]
        from when on nodes have nothing else to do. sent: [N] when each had what it sent."""
        uids, first = transfers.receivers
        takes_place = np.isfinite(arrived)
        last = np.maximum.reduceat(np.where(takes_place, arrived, -np.inf), first)
        mix, tail = np.zeros(computed.size), np.zeros(computed.size)
        speed = self.compute.config.mixing_bytes_per_second
        if speed is not None:
            sizes = np.where(takes_place, transfers.mixed, 0.0)
            come = np.bincount(transfers.target, sizes, computed.size)
            tail[uids] = np.add.reduceat(np.minimum(sizes, TAIL_BYTES), first) / speed
            mix = come / speed if not (self.overlapped and self._background) else tail
        end, late, waited = computed + mix, np.full(computed.size, -1, np.int32), np.zeros(computed.size)
        done = last + tail[uids]
        blocked = np.zeros(len(uids), bool) if self.asynchronous else done > end[uids]
        of_last = np.zeros(computed.size)
        of_last[uids] = last
        at = np.flatnonzero(arrived == of_last[transfers.target])
        late[transfers.target[at][::-1]] = transfers.held_up_by(sent)[at][::-1]  # the lowest uid of several
        waited[uids[blocked]] = done[blocked] - end[uids[blocked]]
        end[uids[blocked]] = done[blocked]
        return end, late, waited


def time_line(clock: Clock, rounds: int) -> TimeLine:
    """Steps the clock and returns what it told. rounds: at least 1."""
    n = clock.compute.num_nodes
    begin, began, computed, end, waited = (np.empty((rounds, n)) for _ in range(5))
    waits_for, present = np.empty((rounds, n), np.int32), np.empty((rounds, n), bool)
    for r in range(rounds):
        begin[r], began[r], computed[r], end[r], waits_for[r], waited[r], present[r] = clock.step()
    return TimeLine(begin, began, computed, end, waits_for, waited, present, clock.asynchronous)
