"""Host memory for buckets on a GPU, where the process group sends only what lies there, as gloo does."""

from __future__ import annotations

import torch
from torch import Tensor

from decentnode.parallel.buckets.bucket import Bucket


class HostCopies:
    """The copies of one bucket in host memory, which is pinned for a GPU; made when first asked for, and used again."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._sent: Tensor | None = None
        self._slots: list[Tensor] = []

    def _new(self) -> Tensor:
        flat = self._bucket.flat
        return torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.is_cuda)

    def of_sent(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` [S], which is sent. Blocking until it is complete."""
        if self._sent is None:
            self._sent = self._new()
        return self._sent.copy_(tensor)

    def of_slot(self, number: int) -> Tensor:
        """[S] for what is received into the bucket's slot of this number."""
        while len(self._slots) <= number:
            self._slots.append(self._new())
        return self._slots[number]
