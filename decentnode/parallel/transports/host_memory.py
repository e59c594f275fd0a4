"""Host memory for buckets on a GPU, where the process group sends only what lies there, as gloo does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.process_group.default_group import backend_of
from decentnode.parallel.transports.base import Flight


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


class HostMemory:
    """Where the process group sends buckets from and receives them into: where they lie, or copies in host memory."""

    def __init__(self) -> None:
        self._copies: dict[int, HostCopies] = {}
        """Of the buckets that the process group cannot send from where they lie."""

    def _copies_of(self, bucket: Bucket) -> HostCopies | None:
        """None where the process group sends a bucket from where it lies. gloo sums what lies on a GPU, but does not
        send it from rank to rank; of all that passes, the copies are made here."""
        device = bucket.flat.device
        if device.type == "cpu" or backend_of(device) == "nccl":
            return None
        return self._copies.setdefault(bucket.index, HostCopies(bucket))

    def leaving(self, bucket: Bucket, tensor: Tensor) -> Tensor:
        """A tensor [S] of a bucket, or its copy, where the process group can send it. Blocking for a copy."""
        copies = self._copies_of(bucket)
        return tensor if copies is None else copies.of_sent(tensor)

    def landing(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> dict[int, Tensor]:
        """Gives a bucket its slots for what comes from these ranks. By rank: the tensor [S] that the process group
        receives into, the slot or one that `land` copies there."""
        copies, found = self._copies_of(bucket), {}
        for number, peer in enumerate(sources):
            found[peer] = bucket.received[peer] = bucket.slot(number)
            if copies is not None:
                found[peer] = copies.of_slot(number)
                flight.landings.append((bucket.received[peer], found[peer]))
        return found

    @staticmethod
    def land(flight: Flight) -> None:
        """Blocking: copies what has arrived in host memory to where it belongs."""
        for slot, arrived in flight.landings:
            slot.copy_(arrived)
