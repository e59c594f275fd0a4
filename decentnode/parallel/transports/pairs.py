"""Point-to-point exchanges over gloo whose waits can be interrupted.

A wait inside gloo lasts up to gloo's time-out, even for a rank that lives but already takes part in another generation.
So one thread for each neighbor waits in place of the training thread, which checks periodically whether to give up. It
starts to wait only when the training does: a thread inside gloo must not outlive the interpreter
(process_group/shutdown.py). All-reduces are not used, since some ranks may finish one and others not when a rank dies.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from decentnode import clock
from decentnode.communication.shared_memory.segment import Backoff
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.membership.control import ConnectionBroken
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.collectives import failure_reason
from decentnode.parallel.transports.base import Flight
from decentnode.parallel.transports.host_memory import HostMemory, HostMemoryExchange
from decentnode.tensors import own_fault

POLL_SECONDS = (20e-6, 1e-3)
LOOK_SECONDS = 0.05


@dataclass(eq=False)
class _Leg:
    """One operation with one peer."""

    peer: int
    receives: bool
    work: Any
    asked: bool = False
    """Whether a thread waits for it."""
    over: bool = False
    failed: Exception | None = None


@dataclass
class PairFlight(Flight):
    legs: list[_Leg] = field(default_factory=list)


class _Line:
    """The thread that waits for one peer's operations, in their order, until it is given None or the process ends."""

    def __init__(self, peer: int, seconds: float) -> None:
        self._seconds = seconds
        self.legs: queue.SimpleQueue[_Leg | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"decentnode-gloo-{peer}", daemon=True).start()

    def _run(self) -> None:
        while (leg := self.legs.get()) is not None:
            try:
                leg.work.wait(timedelta(seconds=self._seconds))
            except Exception as error:
                leg.failed = error
            leg.work = None
            leg.over = True
            del leg


class PairExchange(HostMemoryExchange):
    """`BucketExchange` by point-to-point operations, over the process group that is the default one at construction."""

    def __init__(self, plan: Plan, timeout_seconds: float, memory: HostMemory) -> None:
        super().__init__(plan, timeout_seconds, memory)
        self._group = dist.group.WORLD
        self._lines: dict[int, _Line] = {}

    def depart(self, bucket: Bucket) -> None:
        view = self._departing(bucket)
        if view is None:
            return
        flight = PairFlight(bucket, self._step)
        self._flights[bucket.index] = flight
        sent = self._host.departing(bucket, self._step)
        landing = self._host.landing(bucket, flight, view.sources)
        # All operations are begun, even if a rank is known to be gone; receives first (see transports/collective.py).
        for peer in view.sources:
            self._begin(flight, landing[peer], peer, receives=True)
        for peer in view.neighbors:
            self._begin(flight, sent, peer, receives=False)
            self.bytes_sent += sent.nbytes

    def _begin(self, flight: PairFlight, tensor: Tensor, peer: int, receives: bool) -> None:
        leg = _Leg(peer, receives, None)
        flight.legs.append(leg)
        try:
            if receives:
                leg.work = dist.irecv(tensor, peer, group=self._group)
            else:
                leg.work = dist.isend(tensor, peer, group=self._group)
        except RuntimeError as error:  # the connection is known to be broken
            if own_fault(error):
                raise
            leg.over, leg.failed = True, error

    def _await(self, flight: Flight) -> None:
        assert isinstance(flight, PairFlight)
        self._wait_for(flight.legs, flight.step)
        self._host.land(flight)

    def collect(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> None:  # noqa: ARG002
        assert isinstance(flight, PairFlight)
        self._wait_for([leg for leg in flight.legs if leg.receives and leg.peer in sources], flight.step)
        self._host.land(flight, sources)

    def _wait_for(self, legs: Sequence[_Leg], step: int) -> None:
        """Waits for the operations. Blocking. Raises PeerLost naming the rank."""
        started = clock.now()
        for leg in legs:
            if not leg.asked and not leg.over:
                leg.asked = True
                if leg.peer not in self._lines:
                    self._lines[leg.peer] = _Line(leg.peer, self.timeout_seconds)
                self._lines[leg.peer].legs.put(leg)
        for leg in legs:
            backoff, look = Backoff(POLL_SECONDS), started + LOOK_SECONDS
            while not leg.over:
                now = clock.now()
                if now > look:
                    look = now + LOOK_SECONDS
                    self._look_for(leg.peer, started, now, step)
                backoff.sleep()
            if leg.failed is not None:
                if own_fault(leg.failed):
                    raise leg.failed
                raise ConnectionBroken(f"rank {self.rank}: the exchange of step {step} with rank {leg.peer} failed: "
                                       f"{failure_reason(leg.failed)}", [leg.peer]) from leg.failed  # fmt: skip
        self.wait_seconds += clock.now() - started

    def finish_all(self, seconds: float) -> None:
        for flight in self._flights.values():
            assert isinstance(flight, PairFlight)
            for leg in flight.legs:
                if leg.work is not None and not leg.asked:
                    with contextlib.suppress(RuntimeError):  # after one time-out the other waits fail at once
                        leg.work.wait(timedelta(seconds=seconds))
        self._flights.clear()

    def end(self) -> bool:
        for line in self._lines.values():
            line.legs.put(None)
        self._lines.clear()
        left = super().end()
        self._group = None
        return left
