"""Resolves the faults of an experiment to a plan before the run begins, and tracks in each process, by the time and the
node's own rounds, which faults of the plan are in effect.

Which nodes are hit and when is drawn from the seed alone, so that every process of a run, and everyone who repeats it,
computes the same plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decentnode.errors import UsageError
from decentnode.faults.vocabulary import AnyFault, Fault
from decentnode.rng import GLOBAL, stream

MAX_FAULTS = 100_000
"""Largest number of faults in a resolved plan."""
Plan = tuple[AnyFault, ...]
"""Resolved faults; a fault is identified by its index in the plan."""


def resolve(faults: Sequence[AnyFault], seed: int, num_nodes: int, rounds: int, newcomers: int = 0) -> Plan:
    """Returns the plan, which says when each of these faults occurs and on which nodes: always the same for the same
    arguments. Raises UsageError for unknown nodes, and for more than MAX_FAULTS faults.

    newcomers: how many nodes may join beyond `num_nodes`. Faults may name them. `nodes: all` means the nodes of the
    mapping only, because it is not known beforehand which newcomers join.
    """
    found: list[AnyFault] = []
    for index, fault in enumerate(faults):
        unknown = sorted({uid for uid in fault.uids if not 0 <= uid < num_nodes + newcomers})
        if unknown:
            raise UsageError(f"faults[{index}] must name uids below {num_nodes + newcomers}, got {unknown[0]}")
        for each in fault.resolved(stream(seed, GLOBAL, f"fault {index}"), num_nodes, rounds):
            found.append(each)
            if len(found) > MAX_FAULTS:
                raise UsageError(f"faults[{index}] must leave at most {MAX_FAULTS:,} faults in all, got more")
    return tuple(found)


@dataclass(frozen=True)
class ActiveFault:
    """A fault of a plan that has occurred."""

    index: int
    """Its index in the plan."""
    fault: AnyFault
    since: float
    until: float
    """Seconds of the caller's clock: infinite if it lasts to the end of the run, equal to `since` if it is
    instantaneous."""


def lasts(fault: AnyFault) -> float:
    """Returns for how many seconds a fault is in effect: 0 if it is instantaneous, infinite if it lasts to the end of
    the run."""
    seconds: float | None = getattr(fault, "seconds", 0.0)
    return math.inf if seconds is None else seconds


class FaultTimeline:
    """Tracks which faults of a plan are in effect for one node, by the time and the round. Not thread-safe. All times
    are seconds of one monotonic clock."""

    def __init__(
        self, plan: Plan, uid: int, kinds: tuple[type[Fault], ...],
        on_begin: Callable[[ActiveFault], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """kinds: the kinds of faults to track. on_begin: is called once for each fault that occurs, by the call that
        detects it; not for a fault with a duration that is over by then."""
        own_faults = [(i, each) for i, each in enumerate(plan) if isinstance(each, kinds) and each.concerns(uid)]
        self._by_time = [(each.at_seconds, i, each) for i, each in own_faults if each.at_seconds is not None]
        self._by_round = [(each.at_round, i, each) for i, each in own_faults if each.at_round is not None]
        heapq.heapify(self._by_time)
        heapq.heapify(self._by_round)
        self._on_begin = on_begin
        self._active: list[ActiveFault] = []
        self._run_began = math.inf
        self._is_restart = False
        self._next_change = math.inf
        """When the set of faults in effect changes next because of the time."""

    def begin(self, run_began: float, now: float, is_restart: bool = False) -> None:
        """Starts the tracking; no fault occurs before this call. run_began: when the run began. is_restart: whether an
        earlier process of this node went through the faults so far. Of these, only those by time that still last are in
        effect in this process, and those by round that last to the end of the run."""
        self._run_began, self._is_restart = run_began, is_restart
        while is_restart and self._by_time and run_began + self._by_time[0][0] <= now:
            at_seconds, index, fault = heapq.heappop(self._by_time)
            if lasts(fault):
                self._activate(index, fault, run_began + at_seconds, now)
        self._schedule()

    def enter(self, round: int, now: float) -> None:
        """Is to be called when the node begins a round."""
        while self._by_round and self._by_round[0][0] <= round:
            _, index, fault = heapq.heappop(self._by_round)
            if not self._is_restart or lasts(fault) == math.inf:
                self._activate(index, fault, now, now)
        self._is_restart = False

    def in_effect(self, now: float) -> list[ActiveFault]:
        """Returns the faults in effect; empty before `begin`."""
        if now >= self._next_change:
            self._active = [each for each in self._active if each.until > now]
            while self._by_time and self._run_began + self._by_time[0][0] <= now:
                at_seconds, index, fault = heapq.heappop(self._by_time)
                self._activate(index, fault, self._run_began + at_seconds, now)
            self._schedule()
        return self._active

    def _activate(self, index: int, fault: AnyFault, since: float, now: float) -> None:
        found = ActiveFault(index, fault, since, since + lasts(fault))
        if found.until > now:
            self._active = [*self._active, found]
            self._schedule()
        elif lasts(fault):
            return
        self._on_begin(found)

    def _schedule(self) -> None:
        ends = min((each.until for each in self._active), default=math.inf)
        self._next_change = min(ends, self._run_began + self._by_time[0][0] if self._by_time else math.inf)
