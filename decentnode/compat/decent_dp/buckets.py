"""Steps bucket by bucket, as in Decent-DP: each has an optimizer, schedule, clipping and scaler decision of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

ALIGNED = 32
"""Parameters count toward a bucket's size as multiples of so many elements."""

Named = list[tuple[str, Tensor]]


def split(named: Iterable[tuple[str, Tensor]], bucket_size_in_mb: float) -> Iterator[Named]:
    """Yields buckets of parameters, given in the order of their gradients, cut as in Decent-DP."""
    bucket: Named = []
    size = 0
    for name, p in named:
        bucket.append((name, p))
        size += -(-p.numel() // ALIGNED) * ALIGNED * p.element_size()
        if size >= bucket_size_in_mb * (1 << 20):
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


class BucketSteps:
    """The optimizers of the buckets, and their steps."""

    def __init__(self, scaler: Any, clip: float, bucket_size_in_mb: float) -> None:
        self._scaler, self._clip, self._size = scaler, clip, bucket_size_in_mb
        self._buckets: list[Named] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []

    def make(
        self, named: Named, optim_fn: Callable[[Named], Optimizer], lr_scheduler_fn: Callable[[Optimizer], Any] | None
    ) -> None:
        """Makes the optimizers and schedules. named: in the order in which gradients arrived."""
        self._buckets = list(split(named, self._size))
        self.optimizers = [optim_fn(bucket) for bucket in self._buckets]
        self.schedulers = [None if lr_scheduler_fn is None else lr_scheduler_fn(each) for each in self.optimizers]

    def step(self) -> None:
        for bucket, optimizer, scheduler in zip(self._buckets, self.optimizers, self.schedulers, strict=True):
            if self._clip > 0:
                if self._scaler is not None:
                    self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([p for _, p in bucket], self._clip)
            if self._scaler is not None:
                self._scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        if self._scaler is not None:
            self._scaler.update()
