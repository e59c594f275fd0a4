"""The schedule of one round: computes its times from when nodes begin it and when their transfers arrive.

Sequential: the local steps, then the payloads leave, and the round ends when those of all neighbors have been mixed.
Overlapped: payloads leave at the begin of the round, and the round ends when both the steps and the mixing are done
(docs/explanation/round.rst). With a server: the model goes down, clients that take part make their steps once they have
it, and their changes go up. Asynchronous: the round of a node ends when its own work is done, wherever the others are.

A time is infinite if it is not known yet; all times that follow from it are then infinite, too, and all others final.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import Routes, Transfers

TransfersOfRound = Callable[[int], Sequence[Transfers]]
"""Returns the transfers of each phase of a round."""

TAIL_BYTES = 4 << 20
"""Payloads are mixed in chunks of this size as they arrive: only the last chunk is mixed after the arrival."""


@dataclass(frozen=True, eq=False)
class PlannedRound:
    """What is known of a round before it begins."""

    round: int
    phases: tuple[Transfers, ...]
    seconds: np.ndarray
    """[N] duration of each node's local steps."""
    present: np.ndarray
    """[N] bool, which nodes take part."""
    _takes_place: dict[int, np.ndarray] = field(default_factory=dict)

    def takes_place(self, transfers: Transfers) -> np.ndarray:
        """Returns which transfers take place [F]. transfers: those of one of the round's phases."""
        found = self._takes_place.get(id(transfers))
        if found is None:
            found = self._takes_place[id(transfers)] = self.present[transfers.source] & self.present[transfers.target]
        return found


@dataclass(frozen=True, eq=False)
class TimeLineRow:
    """The times of one round, [N] each, as in `TimeLine`."""

    begin: np.ndarray
    steps_began: np.ndarray
    computed: np.ndarray
    end: np.ndarray
    waits_for: np.ndarray
    waited: np.ndarray
    present: np.ndarray
    arrivals: tuple[tuple[Transfers, np.ndarray], ...]
    """The transfers of each phase that has any, and when they arrived [F]."""


class RoundTiming(Protocol):
    """Determines how long the work and the transfers of one round take."""

    def steps(self, begins: np.ndarray) -> np.ndarray:
        """Returns when the local steps that begin at `begins` [N] are done [N] if no exchange takes any of their
        compute."""
        ...

    def exchange(self, phase: int, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (when the transfers of a phase arrive, a lower bound of it), [F] each. ready: [N] when each node has
        what it sends."""
        ...


class RoundSchedule:
    """The schedule of a round. Parameters as for `Clock`."""

    def __init__(
        self, compute: Compute, transfers: TransfersOfRound, *, overlapped: bool, mixes_in_background: bool,
        leaves_after: float | None, asynchronous: bool, steps_before: int,
        trains: Callable[[int], np.ndarray] | None,
    ) -> None:  # fmt: skip
        self.compute, self.transfers = compute, transfers
        self.steps_before, self._trains = steps_before, trains
        self.overlapped, self._mixes_in_background, self.asynchronous = overlapped, mixes_in_background, asynchronous
        self.leaves_after = (0.0 if overlapped else 1.0) if leaves_after is None else leaves_after

    @property
    def core_resources(self) -> int:
        """Number of resources that are cores of machines; they are numbered before the connections."""
        return self.compute.num_machines if self.compute.config.cores is not None else 0

    def resources(self, routes: Routes) -> np.ndarray:
        """Returns the resources that transfers share with others [F, 5], numbered after the machines' cores; -1 for
        none."""
        uses = routes.sharing.uses
        return np.where(uses >= 0, uses + self.core_resources, -1)

    def plan(self, round: int, present: np.ndarray) -> PlannedRound:
        works = present if self._trains is None else present & self._trains(round)
        seconds = np.where(works, self.compute.seconds(round), 0.0)
        return PlannedRound(round, tuple(self.transfers(round)), seconds, present)

    def begins(self, end: np.ndarray) -> np.ndarray:
        """Returns when nodes that ended a round at `end` begin the next one [N]: once they are available, with
        `when_away: wait`."""
        known = np.isfinite(end)
        if self.compute.availability is None or not known.any():
            return end
        return np.where(known, self.compute.availability.next_available(np.where(known, end, 0.0)), np.inf)

    def min_delay(self, round: int) -> np.ndarray:
        """Returns a lower bound [N] of the time from the begin of a round to the first of its transfers, or of its
        computations that share cores."""
        if self.leaves_after < 1 or self.steps_before or self.core_resources:
            return np.zeros(self.compute.num_nodes)
        return self.plan(round, np.ones(self.compute.num_nodes, bool)).seconds

    def row(self, plan: PlannedRound, begin: np.ndarray, timing: RoundTiming) -> TimeLineRow:
        """Returns the times of a round. begin: [N] when each node begins it."""
        first, waits_for, waited = begin, np.full(begin.size, -1, np.int32), np.zeros(begin.size)
        arrivals: list[tuple[Transfers, np.ndarray]] = []
        for phase, transfers in enumerate(plan.phases[: self.steps_before]):
            if transfers.source.size:
                arrived, _ = timing.exchange(phase, first)
                arrivals.append((transfers, arrived))
                first, waits_on, wait = self._finish_mixing(plan, transfers, arrived, first, first)
                waited += wait
                waits_for = np.where(wait > 0, waits_on, waits_for)
        end = computed = timing.steps(first)
        # No arithmetic for 0 and 1: with infinite times it would give NaN.
        ready = {0.0: begin, 1.0: computed}.get(self.leaves_after)
        if ready is None:
            ready = begin + self.leaves_after * (computed - begin)
        leaving = True
        for phase, transfers in enumerate(plan.phases[self.steps_before :], self.steps_before):
            if not transfers.source.size:
                continue
            sent = ready if leaving else end
            arrived, least = timing.exchange(phase, sent)
            if leaving:
                end = computed = self._slow_down(plan, computed, ready, transfers, arrived, least)
                if 0 < self.leaves_after < 1:
                    arrived = np.maximum(arrived, computed[transfers.source])
                    arrived = transfers.ends(arrived, plan.takes_place(transfers))
            arrivals.append((transfers, arrived))
            end, waits_on, wait = self._finish_mixing(plan, transfers, arrived, end, sent)
            waited += wait
            waits_for = np.where(wait > 0, waits_on, waits_for)
            leaving = False
        end = np.where(plan.present, end + self.compute.config.overhead_seconds, end)
        return TimeLineRow(begin, first, computed, end, waits_for, waited, plan.present, tuple(arrivals))

    @staticmethod
    def _slow_down(
        plan: PlannedRound, computed: np.ndarray, ready: np.ndarray, transfers: Transfers, arrived: np.ndarray,
        least: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Returns when local steps are done [N] during an exchange that takes a share of each node's compute from
        `ready` [N] until it is over. computed: [N] when they would be done without it."""
        if not transfers.take_compute:
            return computed
        takes_place, known = plan.takes_place(transfers), np.isfinite(computed)
        left = np.where(known, np.maximum(np.where(known, computed - ready, 0.0), 0.0), 0.0)
        slowdowns = []
        for each in (arrived, least):
            until, share = transfers.compute_taken(each, takes_place, computed.size)
            seconds = np.maximum(until - np.where(known, ready, 0.0), 0.0)
            slowdowns.append(share * np.minimum(seconds, left / (1 - share)))
        # Steps that are done before the exchange is over do not depend on its end.
        sure = np.isclose(slowdowns[0], slowdowns[1], rtol=1e-9, atol=0.0)
        return np.where(sure, computed + slowdowns[0], np.inf)

    def _finish_mixing(
        self, plan: PlannedRound, transfers: Transfers, arrived: np.ndarray, computed: np.ndarray, sent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (when each node has mixed what arrived, for which node it waited, seconds waited), each [N].
        computed: [N] when nodes have nothing else left to do. sent: [N] when each node had what it sent."""
        uids, first = transfers.receivers
        takes_place = plan.takes_place(transfers)
        last = np.maximum.reduceat(np.where(takes_place, arrived, -np.inf), first)
        mix, tail = np.zeros(computed.size), np.zeros(computed.size)
        speed = self.compute.config.mixing_bytes_per_second
        if speed is not None:
            sizes = np.where(takes_place, transfers.mixed, 0.0)
            received_bytes = np.bincount(transfers.target, sizes, computed.size)
            tail[uids] = np.add.reduceat(np.minimum(sizes, TAIL_BYTES), first) / speed
            mix = received_bytes / speed if not (self.overlapped and self._mixes_in_background) else tail
        end, waits_on, waited = computed + mix, np.full(computed.size, -1, np.int32), np.zeros(computed.size)
        done = last + tail[uids]
        blocked = np.zeros(len(uids), bool) if self.asynchronous else done > end[uids]
        of_last = np.zeros(computed.size)
        of_last[uids] = last
        at = np.flatnonzero(arrived == of_last[transfers.target])
        waits_on[transfers.target[at][::-1]] = transfers.waits_on(sent)[at][::-1]  # the lowest uid of several
        waited[uids[blocked]] = done[blocked] - end[uids[blocked]]
        end[uids[blocked]] = done[blocked]
        return end, waits_on, waited
