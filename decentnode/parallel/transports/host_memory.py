"""Host memory for buckets on a GPU, if the process group can send only from host memory, as with gloo."""

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
    """Copies of one bucket in host memory, pinned for a GPU; allocated at first use, and reused."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._sent: Tensor | None = None
        self._receive_copies: list[Tensor] = []

    def _new(self) -> Tensor:
        flat = self._bucket.flat
        return torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.is_cuda)

    def send_copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy of `tensor` [S], to be sent. Blocking until it is complete."""
        if self._sent is None:
            self._sent = self._new()
        return self._sent.copy_(tensor)

    def receive_copy(self, number: int) -> Tensor:
        """Returns a buffer [S] for what is received for the bucket's slot of this number."""
        while len(self._receive_copies) <= number:
            self._receive_copies.append(self._new())
        return self._receive_copies[number]


class HostMemory:
    """The buffers that the process group sends buckets from and receives them into: the buckets' own tensors, or copies
    in host memory."""

    def __init__(self) -> None:
        self._copies: dict[int, HostCopies] = {}
        """Host copies of the buckets whose own tensors the process group cannot send."""

    @staticmethod
    def _sends_from(bucket: Bucket) -> bool:
        """Returns whether the process group sends a bucket's tensor directly. gloo can all-reduce a tensor on a GPU,
        but has no point-to-point operations for it; here the copies are made for both."""
        device = bucket.flat.device
        return device.type == "cpu" or backend_of(device) == "nccl"

    def _copies_of(self, bucket: Bucket) -> HostCopies | None:
        """Returns the bucket's host copies; None if the process group sends its tensor directly."""
        if self._sends_from(bucket):
            return None
        return self._copies.setdefault(bucket.index, HostCopies(bucket))

    def sendable(self, bucket: Bucket, tensor: Tensor) -> Tensor:
        """Returns a tensor [S] of a bucket, or its host copy if the process group cannot send it. Blocking for a
        copy."""
        copies = self._copies_of(bucket)
        return tensor if copies is None else copies.send_copy(tensor)

    def send_buffer(self, bucket: Bucket, step: int) -> Tensor:  # noqa: ARG002
        """Returns what is sent of a bucket whose snapshot `sent` was taken after `step` steps, in memory that the
        process group can send from. Blocking for a copy."""
        return self.sendable(bucket, bucket.sent)

    def receive_buffers(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> dict[int, Tensor]:
        """Assigns the bucket's receive buffers to these sources. Returns by rank the tensor that the process group
        receives into: that buffer, or one in host memory from which `deliver` copies."""
        copies, found = self._copies_of(bucket), {}
        for number, peer in enumerate(sources):
            found[peer] = bucket.received[peer] = bucket.receive_buffer(number)
            if copies is not None:
                found[peer] = copies.receive_copy(number)
                flight.deliveries[peer] = partial(bucket.receive_buffer(number).copy_, found[peer])
        return found

    @staticmethod
    def deliver(flight: Flight, sources: Sequence[int] | None = None) -> None:
        """Moves what has arrived from these ranks, from all if None, to its destination, at most once. Blocking."""
        for peer in [*flight.deliveries] if sources is None else sources:
            deliver_one = flight.deliveries.pop(peer, None)
            if deliver_one is not None:
                deliver_one()

    def sizes(self, bucket: Bucket) -> set[int]:
        """Returns the sizes in bytes that a bucket may arrive with."""
        return {bucket.size_bytes}

    def accept(self, bucket: Bucket, flight: Flight, number: int, peer: int, body: Tensor) -> None:  # noqa: ARG002
        """Takes the bytes [one of `sizes`] uint8 that came from the source of this number. They must stay unchanged
        until the bucket is mixed."""
        arrived = body.view(bucket.flat.dtype)
        bucket.received[peer] = arrived if bucket.flat.is_cpu else bucket.receive_buffer(number).copy_(arrived)

    def forget(self) -> None:
        """Makes the next exchange independent of the earlier ones."""


class HostMemoryExchange(BucketExchange):
    """A `BucketExchange` whose send and receive buffers come from a `HostMemory`."""

    def __init__(self, plan: Plan, timeout_seconds: float, memory: HostMemory) -> None:
        super().__init__(plan, timeout_seconds)
        self._host = memory

    def drain(self) -> None:
        super().drain()
        self._host.forget()
