"""Buckets on their way between ranks: launched without waiting, waited for with a deadline and a name.

Every rank launches the same buckets in the same order, peers ascending: the order is what keeps point-to-point
operations of one communicator from waiting for each other in a circle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.errors import PeerLost
from decentnode.parallel.advance import Rows
from decentnode.parallel.buckets import Bucket, BucketPart
from decentnode.parallel.plan import Plan


@dataclass
class Flight:
    """The exchange of one bucket in flight."""

    step: int
    works: list[tuple[Any, list[int]]] = field(default_factory=list)
    """Operations, and the ranks that each waits for."""
    use: int = 0
    """Number of the exchange in shared memory."""


class BucketExchange:
    """The exchange of all buckets: a bucket arrives, is mixed part by part, and may depart again for the next step."""

    def __init__(self, plan: Plan, timeout_seconds: float) -> None:
        """Blocking: all ranks make the process groups of the topology's cliques, in one order."""
        self.plan, self.graph, self.rank, self.timeout_seconds = plan, plan.graph, plan.rank, timeout_seconds
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        """Exposed communication: how long waits lasted in all."""
        self._step = -1
        self._flights: dict[int, Flight] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._open_groups()

    def _open_groups(self) -> None:
        everybody = tuple(range(self.graph.num_nodes))
        timeout = timedelta(seconds=self.timeout_seconds)
        for members in self.plan.cliques():
            self._groups[members] = None if members == everybody else dist.new_group(list(members), timeout=timeout)

    # -- away -------------------------------------------------------------------------------------------------

    def launch(self, buckets: Sequence[Bucket], step: int) -> None:
        """Send every bucket as it is now; not blocking."""
        self.begin(step)
        for bucket in buckets:
            for part in bucket.parts:
                self.snapshot(bucket, part)
            self.depart(bucket)

    def begin(self, step: int) -> None:
        """What departs from now on is of this step."""
        self._step = step

    def snapshot(self, bucket: Bucket, part: BucketPart, cached: bool = False) -> None:
        """A part as it is now is what departs. cached: it was just now in the cache."""
        place = self._place(bucket)
        if place is not None:
            copy = None if self._mean_group(self._step) is None else bucket.slot(0)
            bucket.snapshot_part(part, place, copy, cached)

    def one_pass(self, bucket: Bucket, flight: Flight | None) -> bool:
        """Whether `advance` can do what `mix`, the optimizer and `snapshot` do for a part of a bucket."""
        groups = [self._step] if flight is None else [self._step, flight.step]
        view = None if flight is None else self.plan.view(flight.step)
        return bucket.one_pass(view) and all(self._mean_group(step) is None for step in groups)

    def advance(self, bucket: Bucket, part: BucketPart, flight: Flight | None, factor: float, rows: Rows) -> None:
        """Mix a part of a bucket that has arrived, take the optimizer's step, and let it be what departs."""
        view = None if flight is None else self.plan.view(flight.step, factor)
        bucket.advance(part, view, rows, self._place(bucket))

    def _place(self, bucket: Bucket) -> Tensor | None:
        """Where the snapshot goes; None where nobody wants one."""
        view = self.plan.view(self._step)
        return bucket.sent_buffer() if view.neighbors or view.sources else None

    def depart(self, bucket: Bucket) -> None:
        """All parts of a bucket are there: off; not blocking."""
        view = self.plan.view(self._step)
        if not view.neighbors and not view.sources:
            return
        bucket.sent = bucket.sent_buffer()
        flight = self._flights[bucket.index] = Flight(self._step)
        members = self._mean_group(self._step)
        if members is not None:
            others = [peer for peer in members if peer != self.rank]
            with self._blamed(self._step, others):
                work = dist.all_reduce(bucket.slot(0), group=self._groups[members], async_op=True)
            flight.works.append((work, others))
            self.bytes_sent += 2 * bucket.size_bytes * (len(members) - 1) // len(members)
            return
        operations, whom = [], []
        for number, peer in enumerate(view.sources):
            bucket.received[peer] = bucket.slot(number)
        for peer in sorted({*view.neighbors, *view.sources}):
            if peer in view.neighbors:
                operations.append(dist.P2POp(dist.isend, bucket.sent, peer))
                whom.append([peer])
                self.bytes_sent += bucket.size_bytes
            if peer in view.sources:
                operations.append(dist.P2POp(dist.irecv, bucket.received[peer], peer))
                whom.append([peer])
        everybody = sorted({*view.neighbors, *view.sources})
        with self._blamed(self._step, everybody):  # a connection that is known to be broken is told of at once
            works = dist.batch_isend_irecv(operations)
        flight.works = list(zip(works, whom if len(works) == len(whom) else [everybody] * len(works), strict=True))

    def _mean_group(self, step: int) -> tuple[int, ...] | None:
        """The ranks whose mean one all_reduce gives in a step; None where payloads go from rank to rank."""
        clique = self.plan.clique(step)
        return clique.members if clique is not None and clique.members in self._groups else None

    # -- back -------------------------------------------------------------------------------------------------

    def finish(self, bucket: Bucket, factor: float = 1.0) -> None:
        """Blocking: wait for a bucket and mix it. Raises PeerLost naming who did not answer."""
        flight = self.arrive(bucket)
        if flight is not None:
            for part in bucket.parts:
                self.mix(bucket, part, flight, factor)
            self.release(bucket)

    def arrive(self, bucket: Bucket) -> Flight | None:
        """Blocking: wait for a bucket; None if it was not away. Raises PeerLost naming who did not answer."""
        flight = self._flights.get(bucket.index)
        if flight is not None:
            self._wait(flight)
        return flight

    def mix(self, bucket: Bucket, part: BucketPart, flight: Flight, factor: float = 1.0, cached: bool = False) -> None:
        """Mix a part of a bucket that has arrived."""
        if self._mean_group(flight.step) is not None:
            clique = self.plan.clique(flight.step)
            assert clique is not None
            n = len(clique.members)
            bucket.mix_mean(bucket.slot(0), n, factor * clique.strength, part, cached)
        else:
            bucket.mix(self.plan.view(flight.step, factor), part, cached)

    def release(self, bucket: Bucket) -> None:
        """All parts of a bucket are mixed: what arrived is no longer needed."""
        del self._flights[bucket.index]

    def _wait(self, flight: Flight) -> None:
        started = time.perf_counter()
        for work, peers in flight.works:
            with self._blamed(flight.step, peers):
                if dist.get_backend() == "nccl":
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self.timeout_seconds))
        self.wait_seconds += time.perf_counter() - started

    @contextlib.contextmanager
    def _blamed(self, step: int, peers: list[int]) -> Iterator[None]:
        """What torch.distributed raises inside becomes PeerLost with the ranks that it may be about."""
        try:
            yield
        except RuntimeError as error:
            who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {', '.join(map(str, peers))}"
            raise PeerLost(
                f"rank {self.rank}: the exchange of step {step} with {who} failed or took longer than "
                f"{self.timeout_seconds:g} s: {error}", peers,
            ) from error

    def drain(self) -> None:
        """Blocking: wait for what is in flight and use none of it."""
        for flight in self._flights.values():
            self._wait(flight)
        self._flights.clear()

    # -- the end ----------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """This rank takes part no more; whether operations in flight still read and write the buckets. Idempotent."""
        self._groups.clear()
        return bool(self._flights)

    def average(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """What is done inside lasts until all ranks have come to it. Raises PeerLost where it is known who never will.

        what: its name, for messages.
        """
        return contextlib.nullcontext()


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Blocking: the mean of a tensor over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
    return tensor
