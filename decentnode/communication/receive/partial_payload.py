"""One source's payload of one round, as far as it has arrived: in chunks, in a communicator's buffers, or in a slot of
shared memory."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from decentnode.communication.receive.chunking import MESSAGE_COST, TensorPlan, from_buffer
from decentnode.errors import PeerFault
from decentnode.payload import Payload
from decentnode.wire.bounds import Scalars
from decentnode.wire.messages import Chunk

SLOTS = 2
"""Payloads of one phase that a node may keep in memory that others read: one is read while the next is written."""


class SlotReader(Protocol):
    """Reads a neighbor's slots, as `shared_memory.publish_buffer.BufferReader` does. Does not block."""

    @property
    def slots(self) -> list[list[list[Tensor]]]:
        """The tensors of the payload, by phase and slot."""

    @property
    def on_device(self) -> bool:
        """Whether the slots lie in device memory, so that the device's queue has to wait (`enter`) before it reads."""

    def enter(self, phase: int, slot: int) -> None:
        """Makes work queued from now on see what was written."""

    def is_intact(self, phase: int, slot: int, use: int) -> bool:
        """Returns whether the slot still holds the payload with this use number."""

    def release(self, phase: int, slot: int, use: int) -> None:
        """Allows the owner to write the slot again."""


def sliced(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Returns tensor[start:stop], without the cost of slicing if that is the whole tensor."""
    return tensor if stop - start == tensor.numel() else tensor[start:stop]


def non_finite_sources(received: Mapping[int, Payload]) -> list[int]:
    """Returns the sources whose payloads contain NaN or infinity. The test is the sum of a tensor, which is finite
    unless an element is not (or all are huge, which is no better). The host waits for a GPU once for all payloads."""
    found = {uid for uid, each in received.items() if not all(map(math.isfinite, each.scalars.values()))}
    sums = [(uid, tensor.sum(dtype=torch.float64)) for uid, each in received.items()
            for tensor in each.tensors.values() if tensor.is_floating_point()]  # fmt: skip
    if sums:
        totals = torch.stack([total for _, total in sums]).tolist()
        found |= {uid for (uid, _), total in zip(sums, totals, strict=True) if not math.isfinite(total)}
    return [uid for uid in received if uid in found]


class PartialPayload(abc.ABC):
    """One source's payload of one round, as far as it has arrived."""

    __slots__ = ("_plans", "arrived_at", "scalars")

    def __init__(self, plans: tuple[TensorPlan, ...], scalars: Scalars) -> None:
        self._plans, self.scalars = plans, scalars
        self.arrived_at = 0.0
        """When the last bytes arrived (monotonic)."""

    @abc.abstractmethod
    def has(self, tensor: int, chunk: int) -> bool:
        """Returns whether this chunk has arrived, even if it was released since."""

    @property
    @abc.abstractmethod
    def complete(self) -> bool:
        """Whether everything has arrived."""

    @property
    def is_contiguous(self) -> bool:
        """Whether everything has arrived and is contiguous in memory."""
        return False

    @abc.abstractmethod
    def part(self, chunk: int, start: int, stop: int) -> Tensor:
        """Returns one chunk of the first tensor, its elements [start, stop), without a copy."""

    @abc.abstractmethod
    def payload(self) -> Payload:
        """Returns the whole payload. Called once it is complete and assembled."""

    def assemble(self) -> int:
        """Copies the chunks that have arrived into tensors, if the payload arrives in chunks. Returns the bytes that
        this frees."""
        return 0

    def release_chunk(self, chunk: int) -> int:  # noqa: ARG002
        """Releases a chunk of the first tensor that was used. Returns the bytes that this frees."""
        return 0

    def unconsumed_bytes(self) -> int:
        """Returns how many bytes of the sender's window the chunks that are not yet used take."""
        return 0

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the payload: nobody reads it any more."""

    def _named(self, tensors: list[Tensor]) -> Payload:
        named = {plan.name: tensor for plan, tensor in zip(self._plans, tensors, strict=True)}
        return Payload(named, {name: value for name, value in self.scalars.items() if not isinstance(value, str)})


class ChunkedPayload(PartialPayload):
    """A payload that arrives as chunks of bytes."""

    __slots__ = ("assembled", "buffers", "copied", "totals")

    def __init__(self, plans: tuple[TensorPlan, ...]) -> None:
        super().__init__(plans, {})
        self.buffers: list[dict[int, memoryview]] = [{} for _ in plans]
        self.copied: list[set[int]] = [set() for _ in plans]
        self.totals = [plan.expected for plan in plans]
        """Elements of each tensor; None while unknown."""
        self.assembled: list[Tensor] | None = None

    def put(self, message: Chunk, buffer: memoryview, now: float) -> None:
        """Takes one chunk and keeps its buffer. Raises PeerFault for a duplicate, or for a chunk that contradicts an
        earlier one."""
        if self.has(message.tensor, message.chunk):
            raise PeerFault("duplicate_chunk", f"round {message.round} from {message.source}")
        known = self.totals[message.tensor]
        if known is not None and known != message.total:
            name = self._plans[message.tensor].name
            raise PeerFault("wrong_shape", f"{name} of {message.total} elements after {known}")
        self.totals[message.tensor] = message.total
        self.buffers[message.tensor][message.chunk] = buffer
        self.arrived_at = now
        if message.scalars:
            self.scalars = message.scalars

    def has(self, tensor: int, chunk: int) -> bool:
        return chunk in self.buffers[tensor] or chunk in self.copied[tensor]

    @property
    def complete(self) -> bool:
        for plan, total, buffers, copied in zip(self._plans, self.totals, self.buffers, self.copied, strict=True):
            if total is None or len(buffers) + len(copied) < plan.count(total):
                return False
        return True

    def assemble(self) -> int:
        if self.assembled is None:
            if any(total is None for total in self.totals):
                return 0
            self.assembled = [
                torch.empty(total, dtype=plan.spec.dtype)
                for plan, total in zip(self._plans, self.totals, strict=True)
                if total is not None
            ]
        freed = 0
        for plan, tensor, buffers, copied in zip(self._plans, self.assembled, self.buffers, self.copied, strict=True):
            for chunk, buffer in buffers.items():
                start, stop = plan.bounds(chunk, tensor.numel())
                tensor[start:stop] = from_buffer(buffer, plan.spec.dtype)
                freed += buffer.nbytes + MESSAGE_COST
                copied.add(chunk)
            buffers.clear()
        return freed

    def part(self, chunk: int, start: int, stop: int) -> Tensor:  # noqa: ARG002
        return from_buffer(self.buffers[0][chunk], self._plans[0].spec.dtype)

    def release_chunk(self, chunk: int) -> int:
        buffer = self.buffers[0].pop(chunk)
        self.copied[0].add(chunk)
        return buffer.nbytes + MESSAGE_COST

    def payload(self) -> Payload:
        assert self.assembled is not None
        return self._named(self.assembled)

    def release(self) -> None:
        for buffers in self.buffers:
            buffers.clear()

    def unconsumed_bytes(self) -> int:
        return sum(buffer.nbytes + MESSAGE_COST for buffers in self.buffers for buffer in buffers.values())


class MappedPayload(PartialPayload):
    """A payload in a communicator's buffers or in shared memory."""

    __slots__ = ("_on_release", "chunks_received", "tensors")

    def __init__(
        self, plans: tuple[TensorPlan, ...], tensors: list[Tensor], scalars: Scalars, release: Callable[[], None],
        *, chunks_received: int | None = None,
    ) -> None:
        """release: called once nobody reads `tensors` any more."""
        self._plans, self.tensors, self.scalars, self._on_release = plans, tensors, scalars, release
        self.chunks_received = chunks_received
        """How many chunks have arrived, in the order of the plans; None: all."""
        self.arrived_at = 0.0

    def has(self, tensor: int, chunk: int) -> bool:  # noqa: ARG002
        return self.chunks_received is None or chunk < self.chunks_received

    @property
    def complete(self) -> bool:
        return self.chunks_received is None

    @property
    def is_contiguous(self) -> bool:
        return self.chunks_received is None

    def part(self, chunk: int, start: int, stop: int) -> Tensor:  # noqa: ARG002
        return sliced(self.tensors[0], start, stop)

    def payload(self) -> Payload:
        return self._named(self.tensors)

    def release(self) -> None:
        self._on_release()


class SlotPayload(MappedPayload):
    """A payload in a slot of a neighbor's publish buffer. Its owner may write the slot again once the payload is
    released."""

    __slots__ = ("_entered", "phase", "reader", "slot", "use")

    def __init__(self, reader: SlotReader, phase: int, slot: int, use: int, scalars: Scalars) -> None:
        """Takes the fields of a doorbell. The tensors' lengths are checked before `set_tensors`."""
        self.reader, self.phase, self.slot, self.use, self.scalars = reader, phase, slot, use, scalars
        self.chunks_received, self.arrived_at, self._entered = None, 0.0, False

    def set_tensors(self, plans: tuple[TensorPlan, ...], tensors: list[Tensor]) -> None:
        """Sets the tensors of the slot, cut to the lengths that the doorbell announced. Called once, before anything is
        read."""
        self._plans, self.tensors = plans, tensors

    def enter(self) -> None:
        """Prepares to read the payload. Training thread."""
        if self.reader.on_device and not self._entered:
            self._entered = True
            self.reader.enter(self.phase, self.slot)

    def is_intact(self) -> bool:
        """Returns whether everything read so far belongs to the payload that the doorbell announced."""
        return self.reader.is_intact(self.phase, self.slot, self.use)

    def release(self) -> None:
        self.reader.release(self.phase, self.slot, self.use)
