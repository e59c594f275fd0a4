"""Steps as in Decent-DP: its rounds of the topology, its optimizers' hooks, and a step bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentnode.compat.decent_dp.buckets import BucketSteps
from decentnode.compat.decent_dp.mixing import HookedMixing
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.steps.gossip_steps import GossipSteps, OptimizerStep
from decentnode.parallel.transports.base import BucketExchange


class DecentDPSteps(GossipSteps):
    """The steps of the Decent-DP-compatible wrapper; with `faithful` they are taken as in Decent-DP."""

    def __init__(
        self, plan: Plan, buckets: Sequence[Bucket], exchange: BucketExchange, local: OptimizerStep, *,
        names: Mapping[Tensor, str], faithful: bool,
    ) -> None:
        """names: of the exchanged parameters. Raises ValueError for options that Decent-DP does not have (faithful)."""
        if faithful and (plan.delayed or plan.coding is not None):
            what = "delayed=True" if plan.delayed else "compression"
            raise ValueError(f"faithful=True takes the steps of Decent-DP, which has no {what}: leave one of the two "
                             "out")
        super().__init__(plan, buckets, exchange, local)
        self._names, self._faithful = names, faithful
        self.per_bucket: BucketSteps | None = None
        """The steps of every bucket's optimizer (faithful)."""
        self.to_send: dict[str, Tensor] | None = None
        """What the next exchange should send for each parameter: no exchange if empty; None for the current model
        (faithful)."""
        self._hooked: HookedMixing | None = None
        if not faithful and hasattr(local.optimizer, "pre_average_hook"):
            self._hooked, self.part_steps = HookedMixing(self.buckets, [local.optimizer]), None

    def use(self, per_bucket: BucketSteps) -> None:
        """Takes steps with these optimizers from now on (faithful)."""
        self.per_bucket, made = per_bucket, per_bucket.optimizers
        self._hooked = HookedMixing(self.buckets, made, False) if made else None

    def take(self) -> None:
        if self.per_bucket is None:
            super().take()
            return
        self.mix()
        self.per_bucket.step()
        self.launch(self.taken + 1)
        self.taken += 1

    def take_first(self) -> None:
        """Takes the first step of `per_bucket`, which mixes nothing (faithful)."""
        assert self.per_bucket is not None and self._hooked is not None
        self._hooked.call(self.plan.view(1))
        self.per_bucket.step()
        self.taken = 1
        self.launch(1)

    def mix(self) -> None:
        if self._hooked is None:
            super().mix()
        else:
            # Decent-DP's second step mixes what was sent along round 1's edges with the weight of round 2 (faithful).
            hook_round = self.plan.view(self.taken + 1) if self._faithful else None
            self._hooked.mix(self.exchange, self.plan, self.factor, hook_round)

    @torch.no_grad()
    def launch(self, step: int) -> None:
        sent, self.to_send = self.to_send, None
        if sent is None:
            super().launch(step)
            return
        if not sent:
            return
        for bucket in self.buckets:
            bucket.gather()
        values_before = [bucket.flat.clone() for bucket in self.buckets]
        for bucket in self.buckets:
            for p, piece in zip(bucket.params, bucket.pieces(bucket.flat), strict=True):
                piece.copy_(sent.get(self._names[p], piece))
        self.exchange.launch(self.buckets, self.round_of(step))
        for bucket, values in zip(self.buckets, values_before, strict=True):
            bucket.flat.copy_(values)

    def sent_entries(self) -> dict[str, Tensor] | None:
        """Returns what the exchange in flight has sent, as `to_send`: None if that is the current model."""
        sent, same = dict[str, Tensor](), True
        for bucket in self.buckets:
            if self.exchange.flight_of(bucket) is not None:
                bucket.gather()
                same &= torch.equal(bucket.sent, bucket.flat)
                pieces = bucket.pieces(bucket.sent.clone())
                sent |= {self._names[p]: piece for p, piece in zip(bucket.params, pieces, strict=True)}
        return None if sent and same else sent

    def round_of(self, step: int) -> int:
        """Returns the round of a step: Decent-DP exchanges in rounds 1, 3, 4, 5 and so on (faithful)."""
        return step + 1 if self._faithful and step > 1 else step

    def rate(self) -> float:
        if self.per_bucket is None:
            return super().rate()
        made = self.per_bucket.optimizers
        return float(made[0].param_groups[0]["lr"]) if made else 0.0

    def optimizers(self) -> list[Any]:
        """Returns one optimizer for all parameters; with `faithful` one per bucket, none before the second forward
        pass."""
        return [self.local.optimizer] if self.per_bucket is None else self.per_bucket.optimizers

    def schedulers(self) -> list[Any]:
        """Returns a scheduler, or None, for each of `optimizers`."""
        return [self.local.lr_scheduler] if self.per_bucket is None else self.per_bucket.schedulers
