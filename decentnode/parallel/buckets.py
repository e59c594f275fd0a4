"""Parameters as views of flat buckets, and what a bucket needs to be exchanged and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

SAMPLES = 64
"""Elements that are looked at to notice that a script wrote its parameters between two steps."""


def _dense(tensor: Tensor) -> Tensor:
    """The same values in one gapless stretch of memory, with the dimensions in the same order."""
    if torch.empty_like(tensor).stride() == tensor.stride():
        return tensor
    return torch.empty_like(tensor).copy_(tensor)


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype and device; `flat` [S] holds their values."""

    index: int
    params: list[Parameter]
    views: bool
    """Whether the parameters live in `flat`; otherwise they are copied there and back."""
    flat: Tensor = field(init=False)
    sent: Tensor = field(init=False)
    """What was sent last: unchanged until the exchange is over."""
    received: dict[int, Tensor] = field(default_factory=dict)
    """Peer -> [S] receive buffer, made when first needed."""

    def __post_init__(self) -> None:
        total = sum(p.numel() for p in self.params)
        self.flat = torch.empty(total, dtype=self.params[0].dtype, device=self.params[0].device)
        self.sent = torch.empty_like(self.flat)
        self._homes, offset = [], 0
        for p in self.params:
            values = _dense(p.data)
            home = self.flat[offset : offset + p.numel()].as_strided(values.shape, values.stride())
            home.copy_(values)
            if self.views:
                p.data = home
            self._homes.append(home)
            offset += p.numel()
        step = max(1, total // SAMPLES)
        self._sample = torch.arange(0, total, step, device=self.flat.device)

    def gather(self) -> None:
        """Bring the parameters' values into `flat`, wherever a script may have put them."""
        for p, home in zip(self.params, self._homes, strict=True):
            if p.data_ptr() != home.data_ptr() or p.stride() != home.stride():
                home.copy_(p.data)
                if self.views:
                    p.data = home

    def scatter(self) -> None:
        """Bring `flat` back into the parameters."""
        if not self.views:
            for p, home in zip(self.params, self._homes, strict=True):
                p.data.copy_(home)

    def buffer(self, peer: int) -> Tensor:
        if peer not in self.received:
            self.received[peer] = torch.empty_like(self.flat)
        return self.received[peer]

    def written(self) -> bool:
        """Whether somebody wrote parameters since `sent` was taken: by a sample of elements."""
        return not torch.equal(self.flat[self._sample], self.sent[self._sample])

    def mix(self, own: float, others: dict[int, float]) -> None:
        """flat <- own flat + sum of weight * received, added in ascending order of rank.

        Where the script wrote the parameters meanwhile, what they differ from `sent` is kept whole.
        """
        if not others:
            return
        if self.written():
            self.flat.add_(self.sent, alpha=own - 1.0)
        else:
            self.flat.mul_(own)
        for peer in sorted(others):
            self.flat.add_(self.received[peer], alpha=others[peer])


def make_buckets(params: Sequence[Parameter], bytes_per_bucket: int, views: bool) -> list[Bucket]:
    """Trainable parameters in reverse order (gradients come about so), split by dtype, device and size."""
    groups: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for p in reversed(params):
        groups.setdefault((p.dtype, p.device), []).append(p)
    buckets: list[Bucket] = []
    for group in groups.values():
        filled: list[Parameter] = []
        size = 0
        for p in group:
            filled.append(p)
            size += p.numel() * p.element_size()
            if size >= bytes_per_bucket:
                buckets.append(Bucket(len(buckets), filled, views))
                filled, size = [], 0
        if filled:
            buckets.append(Bucket(len(buckets), filled, views))
    return buckets
