"""Injects an experiment's faults into one node: slow local steps, a full disk, a clock jump. Kills and suspensions that
are due when the node begins a round are requested from the process that started it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from decentnode import clock, system
from decentnode.communication.base import Communication
from decentnode.faults import ActiveFault, ClockJump, FaultTimeline, FullDisk, Kill, Pause, Plan, Slow

RequestFault = Callable[[int], None]
"""request(index): request this fault of the plan from a process that outlives the node; not blocking."""
KILLED_SECONDS = 10.0
"""How long a node that has requested its own kill waits for it before it continues with the round."""


class NodeFaults:
    """Injects the faults of one node. Its caller calls `begin` once the node has joined the run, and `enter` before
    each of its rounds."""

    def __init__(self, plan: Plan, communication: Communication, request: RequestFault) -> None:
        """plan: the resolved fault plan."""
        self._communication, self._request = communication, request
        kinds = Kill, Pause, Slow, FullDisk, ClockJump
        self._timeline = FaultTimeline(plan, communication.uid, kinds, self._on_begin)
        self._lock = threading.Lock()
        """Protects `_timeline`, which every thread reads that writes a file or asks for the time of day."""
        self._unreported: list[ActiveFault] = []
        self._kill_requested = False
        self._jumped_seconds = 0.0
        self._hooks: list[tuple[list[Any], Any]] = []
        hook_lists: list[tuple[type, list[Any], Any]] = [
            (FullDisk, system.disk_full_checks, self._disk_is_full), (ClockJump, clock.jumps, self._jump),
        ]  # fmt: skip
        for kind, hooks, hook in hook_lists:
            if any(isinstance(each, kind) and each.concerns(communication.uid) for each in plan):
                hooks.append(hook)
                self._hooks.append((hooks, hook))

    def close(self) -> None:
        """Stop injecting faults, as the node has ended. Idempotent."""
        for hooks, hook in self._hooks:
            hooks.remove(hook)
        self._hooks.clear()

    def begin(self, zero: float, again: bool = False) -> None:
        """Start the fault plan's time. zero: `clock.now()` at the beginning of the run. again: whether the node's
        process was restarted."""
        self._communication.run_began = zero
        with self._lock:
            self._timeline.begin(zero, clock.now(), again)
        if self._communication.fault_injector is not None:
            self._communication.fault_injector.begin(zero, again)

    def enter(self, round: int) -> None:
        """Inject the faults that are due when the node begins a round. Blocks for up to KILLED_SECONDS if the node is
        to be killed."""
        with self._lock:
            self._timeline.enter(round, clock.now())
            self._timeline.in_effect(clock.now())
        if self._communication.fault_injector is not None:
            self._communication.fault_injector.enter(round)
        self._report()
        if self._kill_requested:
            self._kill_requested = False
            clock.sleep(KILLED_SECONDS)

    def slow_down(self, seconds: float) -> float:
        """Sleep after local steps that took `seconds`, for as much longer as active `slow` faults demand. Returns how
        many seconds it slept."""
        now, factor = clock.now(), 1.0
        with self._lock:
            for each in self._timeline.in_effect(now):
                if isinstance(each.fault, Slow):
                    factor *= each.fault.factor
        if factor > 1:
            clock.sleep((factor - 1) * seconds)
        return clock.now() - now

    def _on_begin(self, active: ActiveFault) -> None:
        fault = active.fault
        if isinstance(fault, Kill | Pause):
            if fault.at_round is not None:
                self._request(active.index)
                self._kill_requested |= isinstance(fault, Kill)
            return
        if isinstance(fault, ClockJump):
            self._jumped_seconds += fault.by_seconds
        self._unreported.append(active)

    def _report(self) -> None:
        """Report the faults that began since the previous round. The lock must not be held, as logging asks for the
        time of day."""
        unreported, self._unreported = self._unreported, []
        for each in unreported:
            self._communication.counters.on_event("fault", None, each.fault.as_json)

    def _disk_is_full(self) -> bool:
        with self._lock:
            return any(isinstance(each.fault, FullDisk) for each in self._timeline.in_effect(clock.now()))

    def _jump(self) -> float:
        with self._lock:
            self._timeline.in_effect(clock.now())
            return self._jumped_seconds
