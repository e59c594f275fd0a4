"""Host memory for buckets on a GPU, where the process group sends only what lies there, as gloo does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.default_group import backend_of
from decentnode.parallel.transports.base import BucketExchange, Flight


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

    @staticmethod
    def _sends_from(bucket: Bucket) -> bool:
        """Whether the process group sends a bucket from where it lies. gloo sums what lies on a GPU, but does not send
        it from rank to rank; of all that passes, the copies are made here."""
        device = bucket.flat.device
        return device.type == "cpu" or backend_of(device) == "nccl"

    def _copies_of(self, bucket: Bucket) -> HostCopies | None:
        """None where the process group sends a bucket from where it lies."""
        if self._sends_from(bucket):
            return None
        return self._copies.setdefault(bucket.index, HostCopies(bucket))

    def leaving(self, bucket: Bucket, tensor: Tensor) -> Tensor:
        """A tensor [S] of a bucket, or its copy, where the process group can send it. Blocking for a copy."""
        copies = self._copies_of(bucket)
        return tensor if copies is None else copies.of_sent(tensor)

    def departing(self, bucket: Bucket, step: int) -> Tensor:  # noqa: ARG002
        """What is sent of a bucket whose snapshot `sent` was taken after `step` steps, where the process group can send
        it. Blocking for a copy."""
        return self.leaving(bucket, bucket.sent)

    def landing(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> dict[int, Tensor]:
        """Gives a bucket its slots for what comes from these ranks. By rank: the tensor that the process group receives
        into, the slot or one that `land` copies there."""
        copies, found = self._copies_of(bucket), {}
        for number, peer in enumerate(sources):
            found[peer] = bucket.received[peer] = bucket.slot(number)
            if copies is not None:
                found[peer] = copies.of_slot(number)
                flight.landings[peer] = partial(bucket.slot(number).copy_, found[peer])
        return found

    @staticmethod
    def land(flight: Flight, sources: Sequence[int] | None = None) -> None:
        """Blocking: brings what has arrived from these ranks, from all if None, to where it belongs; once."""
        for peer in [*flight.landings] if sources is None else sources:
            take = flight.landings.pop(peer, None)
            if take is not None:
                take()

    def sizes(self, bucket: Bucket) -> set[int]:
        """How many bytes may come for a bucket."""
        return {bucket.size_bytes}

    def accept(self, bucket: Bucket, flight: Flight, number: int, peer: int, body: Tensor) -> None:  # noqa: ARG002
        """Takes bytes [one of `sizes`] uint8 that came from the source of this number. They stay unchanged until the
        bucket is mixed."""
        arrived = body.view(bucket.flat.dtype)
        bucket.received[peer] = arrived if bucket.flat.is_cpu else bucket.slot(number).copy_(arrived)

    def forget(self) -> None:
        """The next exchange has nothing to do with those before."""


class HostMemoryExchange(BucketExchange):
    """An exchange whose buckets leave and arrive where a `HostMemory` says."""

    def __init__(self, plan: Plan, timeout_seconds: float, memory: HostMemory) -> None:
        super().__init__(plan, timeout_seconds)
        self._host = memory

    def drain(self) -> None:
        super().drain()
        self._host.forget()
