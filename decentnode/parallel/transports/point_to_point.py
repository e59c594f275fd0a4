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
from decentnode.parallel.transports.base import FIRST_TAG, Flight
from decentnode.parallel.transports.host_memory import HostMemory, HostMemoryExchange
from decentnode.tensors import is_own_fault

POLL_SECONDS = (20e-6, 1e-3)
CHECK_SECONDS = 0.05


@dataclass(eq=False)
class _Operation:
    """One operation with one peer."""

    peer: int
    receives: bool
    work: Any
    is_awaited: bool = False
    """Whether a thread waits for it."""
    is_done: bool = False
    error: Exception | None = None


@dataclass
class PointToPointFlight(Flight):
    operations: list[_Operation] = field(default_factory=list)


class _WaitThread:
    """The thread that waits for one peer's operations, in their order, until it is given None or the process ends."""

    def __init__(self, peer: int, seconds: float) -> None:
        self._seconds = seconds
        self.operations: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"decentnode-gloo-{peer}", daemon=True).start()

    def _run(self) -> None:
        while (operation := self.operations.get()) is not None:
            try:
                operation.work.wait(timedelta(seconds=self._seconds))
            except Exception as error:
                operation.error = error
            operation.work = None
            operation.is_done = True
            del operation


class PointToPointExchange(HostMemoryExchange):
    """`BucketExchange` by point-to-point operations, over the process group that is the default one at construction."""

    def __init__(self, plan: Plan, timeout_seconds: float, memory: HostMemory) -> None:
        super().__init__(plan, timeout_seconds, memory)
        self._group = dist.group.WORLD
        self._wait_threads: dict[int, _WaitThread] = {}

    def depart(self, bucket: Bucket) -> None:
        view = self._begin_departure(bucket)
        if view is None:
            return
        flight = PointToPointFlight(bucket, self._step)
        self._flights[bucket.index] = flight
        sent = self._host.send_buffer(bucket, self._step)
        buffers = self._host.receive_buffers(bucket, flight, view.sources)
        # All operations are begun, even if a rank is known to be gone; receives first (see transports/collective.py).
        for peer in view.sources:
            self._begin(flight, buffers[peer], peer, receives=True)
        for peer in view.neighbors:
            self._begin(flight, sent, peer, receives=False)
            self.bytes_sent += sent.nbytes

    def _begin(self, flight: PointToPointFlight, tensor: Tensor, peer: int, receives: bool) -> None:
        operation = _Operation(peer, receives, None)
        flight.operations.append(operation)
        try:
            if receives:
                operation.work = dist.irecv(tensor, peer, group=self._group, tag=FIRST_TAG)
            else:
                operation.work = dist.isend(tensor, peer, group=self._group, tag=FIRST_TAG)
        except RuntimeError as error:  # the connection is known to be broken
            if is_own_fault(error):
                raise
            operation.is_done, operation.error = True, error

    def _await(self, flight: Flight) -> None:
        assert isinstance(flight, PointToPointFlight)
        self._wait_for(flight.operations, flight.step)
        self._host.deliver(flight)

    def collect(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> None:  # noqa: ARG002
        assert isinstance(flight, PointToPointFlight)
        self._wait_for([each for each in flight.operations if each.receives and each.peer in sources], flight.step)
        self._host.deliver(flight, sources)

    def _wait_for(self, operations: Sequence[_Operation], step: int) -> None:
        """Waits for the operations. Blocking. Raises PeerLost naming the rank."""
        started = clock.now()
        for operation in operations:
            if not operation.is_awaited and not operation.is_done:
                operation.is_awaited = True
                if operation.peer not in self._wait_threads:
                    self._wait_threads[operation.peer] = _WaitThread(operation.peer, self.timeout_seconds)
                self._wait_threads[operation.peer].operations.put(operation)
        for operation in operations:
            backoff, next_check = Backoff(POLL_SECONDS), started + CHECK_SECONDS
            while not operation.is_done:
                now = clock.now()
                if now > next_check:
                    next_check = now + CHECK_SECONDS
                    self._check_wait(operation.peer, started, now, step)
                backoff.sleep()
            if operation.error is not None:
                error, peer = operation.error, operation.peer
                if is_own_fault(error):
                    raise error
                raise ConnectionBroken(f"rank {self.rank}: the exchange of step {step} with rank {peer} failed: "
                                       f"{failure_reason(error)}", [peer]) from error  # fmt: skip
        self.wait_seconds += clock.now() - started

    def finish_all(self, seconds: float) -> None:
        for flight in self._flights.values():
            assert isinstance(flight, PointToPointFlight)
            for operation in flight.operations:
                if operation.work is not None and not operation.is_awaited:
                    with contextlib.suppress(RuntimeError):  # after one time-out the other waits fail at once
                        operation.work.wait(timedelta(seconds=seconds))
        self._flights.clear()

    def end(self) -> bool:
        for thread in self._wait_threads.values():
            thread.operations.put(None)
        self._wait_threads.clear()
        left = super().end()
        self._group = None
        return left
