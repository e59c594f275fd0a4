"""Send and receive buffers for buckets that are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from decentnode.errors import PeerFault, PeerLost
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.buckets.packing import Packing
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import Coding
from decentnode.parallel.transports.base import Flight
from decentnode.parallel.transports.host_memory import HostMemory
from decentnode.sharing.operator import make_generator


class CodedMemory(HostMemory):
    """`HostMemory` for buckets that are compressed, on the device on which they are.

    A rank mixes what its neighbors received from it, not its own parameters: x <- x + sum_j W_ij (q_j - q_i), so that
    the mean of the models is kept whatever the compression loses. With a rule of differences, q are the public copies,
    one for each round of the topology's period. They start as the models of the first exchange, which are sent
    uncompressed.
    """

    def __init__(self, plan: Plan, coding: Coding, buckets: Sequence[Bucket]) -> None:
        """Raises ValueError for a compression whose output size is not known in advance."""
        super().__init__()
        self._plan, self._codec, self._differences = plan, coding.codec, coding.differences
        self._packings = [Packing(coding, [p.numel() for p in each.params], each.flat.dtype) for each in buckets]
        self._packed: dict[int, Tensor] = {}
        """Bucket -> the encoded bytes that are sent."""
        self._buffers: dict[tuple[int, int], Tensor] = {}
        """(bucket, source's number; -1 for sending) -> a buffer that the process group receives into or sends from."""
        self._uncompressed_buffers: dict[int, list[Tensor]] = {}
        """The same for buckets that are sent uncompressed in the current exchange; most exchanges have none."""
        self._own_copies: dict[tuple[int, int], Tensor] = {}
        """(bucket, phase) -> [S] this rank's public copy."""
        self._neighbor_copies: dict[tuple[int, int, int], Tensor] = {}
        """(bucket, phase, rank) -> [S] the public copy of a neighbor."""
        self._uncompressed: set[int] = set()
        """Buckets that are sent uncompressed in the current exchange."""

    def send_buffer(self, bucket: Bucket, step: int) -> Tensor:
        packing, snapshot = self._packings[bucket.index], bucket.sent
        key = bucket.index, self._phase(step)
        self._uncompressed.discard(bucket.index)
        self._uncompressed_buffers.pop(bucket.index, None)
        if self._differences and key not in self._own_copies:
            self._uncompressed.add(bucket.index)
            self._own_copies[key] = snapshot.clone()
            return self._sendable(bucket, snapshot.view(torch.uint8))
        if bucket.index not in self._packed:
            self._packed[bucket.index] = snapshot.new_empty(packing.size_bytes, dtype=torch.uint8)
        packed, draws = self._packed[bucket.index], self._draws(bucket, step)
        if self._differences:
            public = self._own_copies[key]
            packing.encode(snapshot.sub_(public), packed, draws)
            packing.add_to(public, packed)
            bucket.record_sent(public)
        else:
            packing.encode(snapshot, packed, draws)
            packing.decode(packed, snapshot)
            bucket.record_sent(snapshot)
        return self._sendable(bucket, packed)

    def _phase(self, step: int) -> int:
        return self._plan.phase(step) if self._differences else 0

    def _draws(self, bucket: Bucket, step: int) -> torch.Generator | None:
        """Returns the random generator of a bucket: another one for each, as for each fragment of a node's model."""
        if self._codec is None:
            return None
        return make_generator(self._codec, replace(self._plan.view(step), fragment=bucket.index), bucket.flat.device)

    def _sendable(self, bucket: Bucket, tensor: Tensor) -> Tensor:
        """Returns the tensor, or a copy that the process group can send. Blocking for a copy."""
        if self._sends_from(bucket):
            return tensor
        return self._buffer(bucket, -1).copy_(tensor)

    def _buffer(self, bucket: Bucket, number: int) -> Tensor:
        """Returns [`_size`] uint8, the buffer for a source, or for sending, in the current exchange."""
        if bucket.index in self._uncompressed:
            buffer = self._new_buffer(bucket)
            self._uncompressed_buffers.setdefault(bucket.index, []).append(buffer)
            return buffer
        key = bucket.index, number
        if key not in self._buffers:
            self._buffers[key] = self._new_buffer(bucket)
        return self._buffers[key]

    def _new_buffer(self, bucket: Bucket) -> Tensor:
        flat, direct = bucket.flat, self._sends_from(bucket)
        return torch.empty(self._size(bucket), dtype=torch.uint8, device=flat.device if direct else "cpu",
                           pin_memory=flat.is_cuda and not direct)  # fmt: skip

    def _size(self, bucket: Bucket) -> int:
        """Returns how many bytes come from each neighbor in the current exchange."""
        return bucket.size_bytes if bucket.index in self._uncompressed else self._packings[bucket.index].size_bytes

    def receive_buffers(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> dict[int, Tensor]:
        found = {}
        for number, peer in enumerate(sources):
            found[peer] = self._buffer(bucket, number)
            flight.deliveries[peer] = partial(self.accept, bucket, flight, number, peer, found[peer])
        return found

    def sizes(self, bucket: Bucket) -> set[int]:
        size = self._packings[bucket.index].size_bytes
        return {size, bucket.size_bytes} if self._differences else {size}

    def accept(self, bucket: Bucket, flight: Flight, number: int, peer: int, body: Tensor) -> None:
        """Does the same as in `HostMemory`. Raises PeerLost naming the rank for malformed bytes."""
        packing, key = self._packings[bucket.index], (bucket.index, self._phase(flight.step), peer)
        try:
            if body.numel() != self._size(bucket):
                raise PeerFault("malformed_payload", f"{body.numel()} bytes instead of {self._size(bucket)}")
            arrived = body.to(bucket.flat.device)
            if bucket.index in self._uncompressed:
                self._neighbor_copies[key] = arrived.view(bucket.flat.dtype).clone()
            elif self._differences:
                packing.add_to(self._neighbor_copies[key], arrived)
            else:
                packing.decode(arrived, bucket.receive_buffer(number))
        except PeerFault as error:
            raise PeerLost(f"rank {self._plan.rank}: what rank {peer} sent in step {flight.step} cannot be decoded: "
                           f"{error}", [peer]) from error  # fmt: skip
        bucket.received[peer] = self._neighbor_copies[key] if self._differences else bucket.receive_buffer(number)

    def forget(self) -> None:
        """Drops the public copies, on all ranks: the next exchange sends whole models."""
        self._own_copies.clear()
        self._neighbor_copies.clear()
