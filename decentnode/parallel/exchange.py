"""Buckets on their way between ranks: launched without waiting, waited for with a deadline and a name.

Every rank launches the same buckets in the same order, peers ascending: the order is what keeps point-to-point
operations of one communicator from waiting for each other in a circle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from decentnode.errors import PeerLost
from decentnode.parallel.buckets import Bucket
from decentnode.parallel.plan import Plan


class Exchange:
    """The exchange of all buckets of one step in flight."""

    def __init__(self, plan: Plan, timeout_seconds: float) -> None:
        self.plan, self.graph, self.rank, self.timeout_seconds = plan, plan.graph, plan.rank, timeout_seconds
        self.step = -1
        """Step whose exchange is in flight; -1: none is."""
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        """Exposed communication: how long waits lasted in all."""
        self._works: dict[int, list[tuple[Any, int | None]]] = {}

    def launch(self, buckets: Sequence[Bucket], step: int) -> None:
        """Send every bucket as it is now; not blocking."""
        self.step = step
        view = self.plan.view(step)
        if not view.neighbors and not view.sources:
            return
        mean = self.plan.mean_strength(view) is not None
        for bucket in buckets:
            if mean:
                total = bucket.buffer(-1)
                bucket.snapshot(bucket.sent_buffer(), total)
                self._works[bucket.index] = [(dist.all_reduce(total, async_op=True), None)]
                self.bytes_sent += 2 * bucket.size_bytes * (self.graph.num_nodes - 1) // self.graph.num_nodes
                continue
            bucket.snapshot(bucket.sent_buffer())
            operations, whom = [], []
            for peer in sorted({*view.neighbors, *view.sources}):
                if peer in view.neighbors:
                    operations.append(dist.P2POp(dist.isend, bucket.sent, peer))
                    whom.append(peer)
                    self.bytes_sent += bucket.size_bytes
                if peer in view.sources:
                    operations.append(dist.P2POp(dist.irecv, bucket.buffer(peer), peer))
                    whom.append(peer)
            works = dist.batch_isend_irecv(operations)
            self._works[bucket.index] = list(zip(works, whom if len(works) == len(whom) else [None] * len(works),
                                                 strict=True))  # fmt: skip

    def finish(self, bucket: Bucket, factor: float = 1.0) -> None:
        """Blocking: wait for a bucket and mix it. Raises PeerLost naming who did not answer."""
        works = self._works.pop(bucket.index, [])
        if not works:
            return
        self._wait(works)
        view = self.plan.view(self.step, factor)
        strength = self.plan.mean_strength(self.plan.view(self.step))
        if strength is not None:
            bucket.mix_mean(bucket.received[-1], self.graph.num_nodes, factor * strength)
        else:
            bucket.mix(view)

    def _wait(self, works: list[tuple[Any, int | None]]) -> None:
        started = time.perf_counter()
        for work, peer in works:
            try:
                if dist.get_backend() == "nccl":
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self.timeout_seconds))
            except RuntimeError as error:
                named = [peer] if peer is not None else [p for p in range(self.graph.num_nodes) if p != self.rank]
                who = f"rank {peer}" if peer is not None else "some rank"
                raise PeerLost(
                    f"rank {self.rank}: the exchange of step {self.step} with {who} failed or took longer than "
                    f"{self.timeout_seconds:g} s: {error}", named,
                ) from error
        self.wait_seconds += time.perf_counter() - started

    def drain(self) -> None:
        """Blocking: wait for what is in flight and use none of it."""
        for works in self._works.values():
            self._wait(works)
        self._works.clear()
        self.step = -1


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Blocking: the mean of a tensor over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
    return tensor
