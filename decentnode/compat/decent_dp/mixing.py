"""Mixing by sums, as in Decent-DP, for optimizers with a `pre_average_hook` and for `faithful=True`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decentnode.compat.decent_dp.topologies import Edge
from decentnode.graph.base import RoundView
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.transports.base import BucketExchange, Flight


class HookedMixing:
    """Mixes x <- own x + sum, with the sum in `p.comm_buffer` of every parameter p while the optimizers' hooks run.

    own = w - s and sum = s (x + the others' x), where w is the rank's weight of its own model and s that of each other
    rank. Optimizers with a `pre_average_hook(edge, weight)` have it called. What a hook writes into the buffers is what
    is added.
    """

    def __init__(
        self, buckets: Sequence[Bucket], optimizers: Sequence[Optimizer], keep_written: bool = True
    ) -> None:
        """keep_written: what a script has written into the parameters since they were sent is kept completely;
        otherwise it is mixed with weight `own`, as a part of x above."""
        self._buckets, self._keep_written = buckets, keep_written
        self._optimizers = [each for each in optimizers if hasattr(each, "pre_average_hook")]
        self._sums = [bucket.flat.clone() for bucket in buckets]
        for bucket, total in zip(buckets, self._sums, strict=True):
            for p, piece in zip(bucket.params, bucket.pieces(total), strict=True):
                p.comm_buffer = piece  # type: ignore[attr-defined]

    def call(self, view: RoundView) -> None:
        """Calls the hooks with the edge of the round and the rank's weight of its own model."""
        weight = view.weights[view.uid]
        edge = Edge(sorted({view.uid, *view.sources}), weight)
        for optimizer in self._optimizers:
            optimizer.pre_average_hook(edge, weight)

    @torch.no_grad()
    def mix(self, exchange: BucketExchange, plan: Plan, factor: float, hook_round: RoundView | None = None) -> None:
        """Waits for all buckets, calls the hooks and mixes. Blocking. Raises PeerLost.

        hook_round: the round whose edge the hooks get, and which defines the rank's weight; the exchange's if None.
        """
        flights: list[Flight | None] = []
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            bucket.gather()
            flight = exchange.arrive(bucket)
            flights.append(flight)
            if flight is not None:
                self._sum(bucket, plan.view(flight.step), exchange.summed(bucket, flight), total)
        flying = [flight for flight in flights if flight is not None]
        if not flying:
            return
        view = plan.view(flying[0].step) if hook_round is None else hook_round
        self.call(view)
        own = 1 - factor + factor * (view.weights[view.uid] - _share(view))
        for bucket, total, sent in zip(self._buckets, self._sums, flights, strict=True):
            if sent is not None:
                written = bucket.flat - bucket.sent if self._keep_written else None
                bucket.flat.mul_(own).add_(total, alpha=factor)
                if written is not None:
                    bucket.flat.add_(written, alpha=1 - own)
                exchange.release(bucket)
            bucket.scatter()

    @staticmethod
    def _sum(bucket: Bucket, view: RoundView, summed: Tensor | None, total: Tensor) -> None:
        share: Any = _share(view)
        if summed is not None:
            torch.mul(summed, share, out=total)
            return
        torch.mul(bucket.sent, share, out=total)
        for peer in view.sources:
            total.add_(bucket.received[peer], alpha=view.weights[peer])


def _share(view: RoundView) -> float:
    return (1 - view.weights[view.uid]) / max(1, len(view.sources))
