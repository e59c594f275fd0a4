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
from decentnode.graph.base import Graph
from decentnode.parallel.buckets import Bucket


class Exchange:
    """The exchange of all buckets of one step in flight."""

    def __init__(self, graph: Graph, rank: int, timeout_seconds: float) -> None:
        self.graph, self.rank, self.timeout_seconds = graph, rank, timeout_seconds
        self.step = -1
        """Step whose exchange is in flight; -1: none is."""
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        """Exposed communication: how long waits lasted in all."""
        self._works: dict[int, list[tuple[Any, int | None]]] = {}

    def weights(self, step: int, factor: float = 1.0) -> tuple[float, dict[int, float]]:
        """(own weight, {peer: weight}) of a step; factor a: x <- x + a (W x - x)."""
        row = self.graph.weights(self.rank, step)
        others = {peer: factor * weight for peer, weight in row.items() if peer != self.rank}
        return 1.0 - factor + factor * row[self.rank], others

    def _averages_all(self, step: int) -> bool:
        """Whether everybody gets the plain mean of everybody: one all_reduce does it."""
        row = self.graph.weights(self.rank, step)
        n = self.graph.num_nodes
        return n > 2 and self.graph.period == 1 and len(row) == n and all(abs(w * n - 1) < 1e-12 for w in row.values())

    def launch(self, buckets: Sequence[Bucket], step: int) -> None:
        """Send every bucket as it is now; not blocking."""
        self.step = step
        targets, sources = self.graph.neighbors(self.rank, step), self.graph.sources(self.rank, step)
        for bucket in buckets:
            if not targets and not sources:
                continue
            bucket.sent.copy_(bucket.flat)
            size = bucket.flat.numel() * bucket.flat.element_size()
            if self._averages_all(step):
                total = bucket.buffer(-1)
                total.copy_(bucket.flat)
                self._works[bucket.index] = [(dist.all_reduce(total, async_op=True), None)]
                self.bytes_sent += 2 * size * (self.graph.num_nodes - 1) // self.graph.num_nodes
                continue
            operations, whom = [], []
            for peer in sorted({*targets, *sources}):
                if peer in targets:
                    operations.append(dist.P2POp(dist.isend, bucket.sent, peer))
                    whom.append(peer)
                    self.bytes_sent += size
                if peer in sources:
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
        own, others = self.weights(self.step, factor)
        if -1 in bucket.received and self._averages_all(self.step):
            mean = bucket.received[-1].div_(self.graph.num_nodes)
            if factor == 1.0 and not bucket.written():
                bucket.flat.copy_(mean)
            else:
                bucket.flat.add_(mean, alpha=factor).add_(bucket.sent, alpha=-factor)
            return
        bucket.mix(own, others)

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
