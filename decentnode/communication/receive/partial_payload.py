"""What one source's payload of a round is, as far as it has come."""

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
"""Payloads of one phase that a neighbor may hold in memory that others read: one is read while the next is written."""


class SlotReader(Protocol):
    """Reads a neighbor's slots: `shared_memory.publish_buffer.BufferReader`. Not blocking."""

    @property
    def slots(self) -> list[list[list[Tensor]]]:
        """By phase and slot: the tensors of the payload."""

    @property
    def imported(self) -> bool:
        """Whether the slots lie in a device's memory, whose queue has to be told of reads."""

    def enter(self, phase: int, slot: int) -> None:
        """What is queued from now on sees what was written."""

    def intact(self, phase: int, slot: int, use: int) -> bool:
        """Whether the slot still holds the payload of this use."""

    def release(self, phase: int, slot: int, use: int) -> None:
        """The owner may write the slot again."""


def cut(tensor: Tensor, start: int, stop: int) -> Tensor:
    """tensor[start:stop], without the price of a slice where that is all of it."""
    return tensor if stop - start == tensor.numel() else tensor[start:stop]


def not_finite(received: Mapping[int, Payload]) -> list[int]:
    """Returns the sources whose payloads have NaN or infinity: the sum of a tensor is finite unless an element is not
    (or all are huge, which is no better). The host waits for a GPU, once for all payloads."""
    found = {uid for uid, each in received.items() if not all(map(math.isfinite, each.scalars.values()))}
    sums = [(uid, tensor.sum(dtype=torch.float64)) for uid, each in received.items()
            for tensor in each.tensors.values() if tensor.is_floating_point()]  # fmt: skip
    if sums:
        totals = torch.stack([total for _, total in sums]).tolist()
        found |= {uid for (uid, _), total in zip(sums, totals, strict=True) if not math.isfinite(total)}
    return [uid for uid in received if uid in found]


class PartialPayload(abc.ABC):
    """One source's payload of one round as far as it has come."""

    __slots__ = ("_plans", "arrived", "scalars")

    def __init__(self, plans: tuple[TensorPlan, ...], scalars: Scalars) -> None:
        self._plans, self.scalars = plans, scalars
        self.arrived = 0.0
        """When the last bytes came (monotonic)."""

    @abc.abstractmethod
    def has(self, tensor: int, chunk: int) -> bool:
        """Whether this chunk came, be it used up by now."""

    @property
    @abc.abstractmethod
    def complete(self) -> bool:
        """Whether everything came."""

    @property
    def in_one_piece(self) -> bool:
        """Whether all of it is there and lies together."""
        return False

    @abc.abstractmethod
    def part(self, chunk: int, start: int, stop: int) -> Tensor:
        """One chunk of the first tensor, its elements [start, stop), without a copy."""

    @abc.abstractmethod
    def payload(self) -> Payload:
        """The whole, once it is complete and assembled."""

    def assemble(self) -> int:
        """Copy what has come into tensors of its own where it must be; the bytes that this frees."""
        return 0

    def take(self, chunk: int) -> int:  # noqa: ARG002
        """A chunk of the first tensor is used up; the bytes that this frees."""
        return 0

    def waiting_bytes(self) -> int:
        """What its chunks that are not used up count for in the sender's window."""
        return 0

    @abc.abstractmethod
    def let_go(self) -> None:
        """Nobody reads it any more."""

    def _named(self, tensors: list[Tensor]) -> Payload:
        named = {plan.name: tensor for plan, tensor in zip(self._plans, tensors, strict=True)}
        return Payload(named, {name: value for name, value in self.scalars.items() if not isinstance(value, str)})


class ChunkedPayload(PartialPayload):
    """One that comes as chunks of bytes."""

    __slots__ = ("assembled", "buffers", "copied", "totals")

    def __init__(self, plans: tuple[TensorPlan, ...]) -> None:
        super().__init__(plans, {})
        self.buffers: list[dict[int, memoryview]] = [{} for _ in plans]
        self.copied: list[set[int]] = [set() for _ in plans]
        self.totals = [plan.expected for plan in plans]
        """Elements of each tensor as far as they are known."""
        self.assembled: list[Tensor] | None = None

    def put(self, message: Chunk, buffer: memoryview, now: float) -> None:
        """Take one chunk, whose buffer is kept. Raises PeerFault for one that is here already, or that contradicts
        another."""
        if self.has(message.tensor, message.chunk):
            raise PeerFault("duplicate_chunk", f"round {message.round} from {message.source}")
        known = self.totals[message.tensor]
        if known is not None and known != message.total:
            name = self._plans[message.tensor].name
            raise PeerFault("wrong_shape", f"{name} of {message.total} elements after {known}")
        self.totals[message.tensor] = message.total
        self.buffers[message.tensor][message.chunk] = buffer
        self.arrived = now
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

    def take(self, chunk: int) -> int:
        buffer = self.buffers[0].pop(chunk)
        self.copied[0].add(chunk)
        return buffer.nbytes + MESSAGE_COST

    def payload(self) -> Payload:
        assert self.assembled is not None
        return self._named(self.assembled)

    def let_go(self) -> None:
        for buffers in self.buffers:
            buffers.clear()

    def waiting_bytes(self) -> int:
        return sum(buffer.nbytes + MESSAGE_COST for buffers in self.buffers for buffer in buffers.values())


class MappedPayload(PartialPayload):
    """One that lies in a communicator's buffers, or in memory that is shared."""

    __slots__ = ("_let_go", "pieces", "tensors")

    def __init__(
        self, plans: tuple[TensorPlan, ...], tensors: list[Tensor], scalars: Scalars, let_go: Callable[[], None],
        *, pieces: int | None = None,
    ) -> None:
        """let_go: called once nobody reads `tensors` any more."""
        self._plans, self.tensors, self.scalars, self._let_go = plans, tensors, scalars, let_go
        self.pieces = pieces
        """How many chunks are there, in the order of the plans; None: all."""
        self.arrived = 0.0

    def has(self, tensor: int, chunk: int) -> bool:  # noqa: ARG002
        return self.pieces is None or chunk < self.pieces

    @property
    def complete(self) -> bool:
        return self.pieces is None

    @property
    def in_one_piece(self) -> bool:
        return self.pieces is None

    def part(self, chunk: int, start: int, stop: int) -> Tensor:  # noqa: ARG002
        return cut(self.tensors[0], start, stop)

    def payload(self) -> Payload:
        return self._named(self.tensors)

    def let_go(self) -> None:
        self._let_go()


class SlotPayload(MappedPayload):
    """One that lies in a slot of a neighbor's publish buffer, which its owner may write again once it is let go of."""

    __slots__ = ("_entered", "phase", "reader", "slot", "use")

    def __init__(self, reader: SlotReader, phase: int, slot: int, use: int, scalars: Scalars) -> None:
        """As a doorbell says; what it says of the tensors' lengths is checked before `lay_out`."""
        self.reader, self.phase, self.slot, self.use, self.scalars = reader, phase, slot, use, scalars
        self.pieces, self.arrived, self._entered = None, 0.0, False

    def lay_out(self, plans: tuple[TensorPlan, ...], tensors: list[Tensor]) -> None:
        """To be called once, before anything is read. tensors: those of the slot, as long as the doorbell says."""
        self._plans, self.tensors = plans, tensors

    def enter(self) -> None:
        """Training thread, before it reads the payload."""
        if self.reader.imported and not self._entered:
            self._entered = True
            self.reader.enter(self.phase, self.slot)

    def intact(self) -> bool:
        """Whether what was read from it so far is the payload that the doorbell told of."""
        return self.reader.intact(self.phase, self.slot, self.use)

    def let_go(self) -> None:
        self.reader.release(self.phase, self.slot, self.use)
