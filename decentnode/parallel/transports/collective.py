"""The transport `collective`: exchanges buckets by operations of torch.distributed.

Every rank launches the same buckets in the same order, peers ascending. The common order keeps the point-to-point
operations of one communicator from deadlock.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from decentnode import clock
from decentnode.errors import PeerLost
from decentnode.parallel.buckets.bucket import Bucket, BucketPart
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.collectives import failure_reason
from decentnode.parallel.process_group.default_group import backend_of
from decentnode.parallel.process_group.shutdown import new_group
from decentnode.parallel.transports.base import FIRST_TAG, Flight
from decentnode.parallel.transports.host_memory import HostMemory, HostMemoryExchange
from decentnode.tensors import is_own_fault

_tags = itertools.count(FIRST_TAG)
"""A tag for each exchange, so that those of two wrappers are not confused where ranks step them in another order. The
same on all ranks, as they make their exchanges in the same order."""


class CollectiveExchange(HostMemoryExchange):
    """`BucketExchange` by point-to-point operations, and in cliques by one all_reduce."""

    def __init__(self, plan: Plan, timeout_seconds: float, memory: HostMemory) -> None:
        """Makes the process groups of the topology's cliques, on all ranks in the same order. Blocking."""
        super().__init__(plan, timeout_seconds, memory)
        self._tag = next(_tags)
        self._groups: dict[tuple[int, ...], Any] = {}
        everybody = tuple(range(self.graph.num_nodes))
        timeout = timedelta(seconds=self.timeout_seconds)
        for members in self.plan.cliques():
            self._groups[members] = None if members == everybody else new_group(members, timeout)

    def _mean_group(self, step: int) -> tuple[int, ...] | None:
        """Returns the ranks that average with one all_reduce in a step; None if payloads are sent point-to-point."""
        clique = self.plan.clique(step)
        return clique.members if clique is not None and clique.members in self._groups else None

    # -- sending ----------------------------------------------------------------------------------------------

    def snapshot(self, bucket: Bucket, part: BucketPart, cached: bool = False) -> None:
        place = self._snapshot_target(bucket)
        if place is not None:
            copy = None if self._mean_group(self._step) is None else bucket.receive_buffer(0)
            bucket.snapshot_part(part, place, copy, cached)

    def supports_one_pass(self, bucket: Bucket, flight: Flight | None) -> bool:
        groups = [self._step] if flight is None else [self._step, flight.step]
        view = None if flight is None else self.plan.view(flight.step)
        return bucket.supports_one_pass(view) and all(self._mean_group(step) is None for step in groups)

    def depart(self, bucket: Bucket) -> None:
        view = self._begin_departure(bucket)
        if view is None:
            return
        flight = self._flights[bucket.index] = Flight(bucket, self._step)
        members = self._mean_group(self._step)
        if members is not None:
            others, snapshot = [peer for peer in members if peer != self.rank], bucket.receive_buffer(0)
            total = self._host.sendable(bucket, snapshot)
            if total is not snapshot:
                flight.deliveries[self.rank] = partial(snapshot.copy_, total)
            with self._blamed(self._step, others):
                work = dist.all_reduce(total, group=self._groups[members], async_op=True)
            flight.works.append((work, others))
            self.bytes_sent += 2 * bucket.size_bytes * (len(members) - 1) // len(members)
            return
        operations, peers = [], []
        sent = self._host.send_buffer(bucket, self._step)
        buffers = self._host.receive_buffers(bucket, flight, view.sources)
        for peer in view.sources:  # receives first: gloo's "ready to receive" queues behind data on the connection
            operations.append(dist.P2POp(dist.irecv, buffers[peer], peer, tag=self._tag))
            peers.append([peer])
        for peer in view.neighbors:
            operations.append(dist.P2POp(dist.isend, sent, peer, tag=self._tag))
            peers.append([peer])
            self.bytes_sent += sent.nbytes
        everybody = sorted({*view.neighbors, *view.sources})
        with self._blamed(self._step, everybody):  # torch raises here if it already knows that a connection is broken
            works = dist.batch_isend_irecv(operations)
        flight.works = list(zip(works, peers if len(works) == len(peers) else [everybody] * len(works), strict=True))

    # -- receiving --------------------------------------------------------------------------------------------

    def _await(self, flight: Flight) -> None:
        started = clock.now()
        by_nccl = backend_of(flight.bucket.flat.device) == "nccl"
        for work, peers in flight.works:
            with self._blamed(flight.step, peers):
                if by_nccl:  # with a time-out the host would wait, not the GPU
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self.timeout_seconds))
        self._host.deliver(flight)
        self.wait_seconds += clock.now() - started

    def summed(self, bucket: Bucket, flight: Flight) -> Tensor | None:
        return None if self._mean_group(flight.step) is None else bucket.receive_buffer(0)

    def mix(self, bucket: Bucket, part: BucketPart, flight: Flight, factor: float = 1.0, cached: bool = False) -> None:
        if self._mean_group(flight.step) is not None:
            clique = self.plan.clique(flight.step)
            assert clique is not None
            n = len(clique.members)
            bucket.mix_mean(bucket.receive_buffer(0), n, factor * clique.strength, part, cached)
        else:
            bucket.mix(self.plan.view(flight.step, factor), part, cached)

    def end(self) -> bool:
        self._groups.clear()
        return super().end()

    @contextlib.contextmanager
    def average(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_own_fault(error):
                raise
            raise PeerLost(f"rank {self.rank}: {what} failed: {failure_reason(error)}") from error

    @contextlib.contextmanager
    def _blamed(self, step: int, peers: list[int]) -> Iterator[None]:
        """Converts torch.distributed's exceptions to PeerLost, with the ranks that may be the cause."""
        try:
            yield
        except RuntimeError as error:
            if is_own_fault(error):
                raise
            who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {', '.join(map(str, peers))}"
            reason = failure_reason(error)
            timed_out = "timed out" in reason.lower() or "timeout" in reason.lower()
            how = f"took longer than {self.timeout_seconds:g} s" if timed_out else f"failed: {reason}"
            raise PeerLost(f"rank {self.rank}: the exchange of step {step} with {who} {how}", peers) from error
