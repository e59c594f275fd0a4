"""Steps that mix, update and send one part of a bucket after the other, while it is in a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from decentnode.optim.parts import Division, restrict_groups
from decentnode.parallel.buckets.advance import AdamSteps
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.transports.base import BucketExchange


class PartSteps:
    """Takes steps of an optimizer part by part, with bitwise the result of a step of all parameters at once."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        parts = [part for bucket in buckets for part in bucket.parts]
        self._division = Division([part.params for part in parts])
        self._adam = {part: AdamSteps(part.params) for part in parts}

    def take(self, optimizer: Optimizer, exchange: BucketExchange, number: int, factor: float) -> None:
        """Takes a step: waits for every bucket, mixes it, updates it, and sends it. Blocking until all have arrived.

        optimizer: one that `optim.parts.can_divide_step` accepts. number: the round in which the buckets depart.
        factor: the mixing factor.
        """
        groups = iter(self._division.groups(optimizer))
        exchange.begin(number)
        for bucket in self._buckets:
            bucket.gather()
            flight = exchange.arrive(bucket)
            one_pass = exchange.supports_one_pass(bucket, flight)
            for part in bucket.parts:
                mine = next(groups)
                rows = self._adam[part].take(optimizer, mine) if one_pass else None
                if rows is not None:
                    exchange.advance(bucket, part, flight, factor, rows)
                    continue
                if flight is not None:
                    exchange.mix(bucket, part, flight, factor, part.small)
                self.update(optimizer, mine)
                exchange.snapshot(bucket, part, part.small)
            if flight is not None:
                exchange.release(bucket)
            exchange.depart(bucket)
        self.update(optimizer, next(groups))

    @staticmethod
    def update(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Takes the optimizer's step for these groups alone."""
        if groups:
            with restrict_groups(optimizer, groups):
                optimizer.step()


def can_mix_in_parts(buckets: Sequence[Bucket]) -> bool:
    """Returns whether buckets can be mixed in parts: on a CPU, as views, by a rule that is not sequential."""
    return all(bucket.views and bucket.flat.device.type == "cpu" and not bucket.rule.requirements.sequential
               for bucket in buckets)  # fmt: skip
