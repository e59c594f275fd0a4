"""From the faults of an experiment to those in effect: a list of faults is resolved before the run begins, and
each process follows the plan by the time and its own rounds.

Whom and when is drawn from the seed alone, so that every process of a run, and everybody who repeats it, comes to the
same plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decentnode.errors import UsageError
from decentnode.faults.vocabulary import AnyFault, Fault
from decentnode.rng import GLOBAL, stream

MAX_STRIKES = 100_000
"""Most faults of a resolved plan."""
Plan = tuple[AnyFault, ...]
"""Resolved faults; a fault is named by its place in it."""


def resolve(faults: Sequence[AnyFault], seed: int, num_nodes: int, rounds: int, newcomers: int = 0) -> Plan:
    """Returns when and whom each of these faults strikes: always the same for the same arguments. Raises UsageError
    for nodes that there are not, and for more than MAX_STRIKES.

    newcomers: how many nodes may come beyond these. Faults may name them; `nodes: all` are those of the mapping, as
    nobody knows beforehand who comes."""
    found: list[AnyFault] = []
    for index, fault in enumerate(faults):
        unknown = sorted({uid for uid in fault.uids if not 0 <= uid < num_nodes + newcomers})
        if unknown:
            raise UsageError(f"faults[{index}] must name uids below {num_nodes + newcomers}, got {unknown[0]}")
        for each in fault.resolved(stream(seed, GLOBAL, f"fault {index}"), num_nodes, rounds):
            found.append(each)
            if len(found) > MAX_STRIKES:
                raise UsageError(f"faults[{index}] must leave at most {MAX_STRIKES:,} faults in all, got more")
    return tuple(found)


@dataclass(frozen=True)
class InEffect:
    """A fault of a plan that came about."""

    index: int
    """Its place in the plan."""
    fault: AnyFault
    since: float
    until: float
    """Seconds of the caller's clock: infinite where it lasts to the end of the run, `since` where it is but a
    moment."""


def lasts(fault: AnyFault) -> float:
    """Returns for how many seconds a fault is in effect: 0 for one that is but a moment, infinite for one that lasts to
    the end of the run."""
    seconds: float | None = getattr(fault, "seconds", 0.0)
    return math.inf if seconds is None else seconds


class Course:
    """Which faults of a plan are in effect for one node, by the time and the round. Not for several threads. now:
    seconds of any monotonic clock."""

    def __init__(
        self, plan: Plan, uid: int, kinds: tuple[type[Fault], ...], began: Callable[[InEffect], None] = lambda _: None
    ) -> None:
        """kinds: the faults of the plan that count. began: is told once of each that comes about, by the call that
        finds it out."""
        mine = [(i, each) for i, each in enumerate(plan) if isinstance(each, kinds) and each.concerns(uid)]
        self._by_time = [(each.at_seconds, i, each) for i, each in mine if each.at_seconds is not None]
        self._by_round = [(each.at_round, i, each) for i, each in mine if each.at_round is not None]
        heapq.heapify(self._by_time)
        heapq.heapify(self._by_round)
        self._began = began
        self._current: list[InEffect] = []
        self._zero = math.inf
        self._again = False
        self._next = math.inf
        """When the set of those in effect changes by itself."""

    def begin(self, zero: float, now: float, again: bool = False) -> None:
        """The run began at `zero`; nothing comes about before this call. again: whether an earlier process of this node
        went through the faults so far: of these, only what lasts is in effect in this one."""
        self._zero, self._again = zero, again
        while again and self._by_time and zero + self._by_time[0][0] <= now:
            at, index, fault = heapq.heappop(self._by_time)
            if lasts(fault):
                self._strike(index, fault, zero + at, now)
        self._schedule()

    def enter(self, round: int, now: float) -> None:
        """The node begins a round."""
        while self._by_round and self._by_round[0][0] <= round:
            _, index, fault = heapq.heappop(self._by_round)
            if not self._again or lasts(fault) == math.inf:
                self._strike(index, fault, now, now)
        self._again = False

    def in_effect(self, now: float) -> list[InEffect]:
        """Returns the faults in effect; empty before `begin`."""
        if now >= self._next:
            self._current = [each for each in self._current if each.until > now]
            while self._by_time and self._zero + self._by_time[0][0] <= now:
                at, index, fault = heapq.heappop(self._by_time)
                self._strike(index, fault, self._zero + at, now)
            self._schedule()
        return self._current

    def _strike(self, index: int, fault: AnyFault, since: float, now: float) -> None:
        found = InEffect(index, fault, since, since + lasts(fault))
        if found.until > now:
            self._current = [*self._current, found]
            self._schedule()
        elif lasts(fault):
            return
        self._began(found)

    def _schedule(self) -> None:
        ends = min((each.until for each in self._current), default=math.inf)
        self._next = min(ends, self._zero + self._by_time[0][0] if self._by_time else math.inf)
