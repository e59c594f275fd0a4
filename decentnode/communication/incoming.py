"""What one source's payload of a round is, as far as it has come."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decentnode.communication.plan import MESSAGE_COST, TensorPlan, from_buffer
from decentnode.payload import Payload
from decentnode.wire.messages import Scalars


def cut(tensor: Tensor, start: int, stop: int) -> Tensor:
    """tensor[start:stop], without the price of a slice where that is all of it."""
    return tensor if stop - start == tensor.numel() else tensor[start:stop]


class Incoming:
    """One source's payload of one round as far as it has come."""

    mapped: list[Tensor] | None = None
    """The payload in the neighbor's shared memory or in a communicator's buffers, instead of `buffers`."""
    pieces: int | None = None
    """How many chunks of `mapped` are there, in the order of the plans; None: all."""
    let_go: Callable[[], None] = staticmethod(lambda: None)
    enter: Callable[[], None] | None = None
    """What the training thread does once before it reads `mapped`."""
    arrived = 0.0
    """When the last bytes came (monotonic)."""
    assembled: list[Tensor] | None = None

    def __init__(self, tensors: tuple[TensorPlan, ...]) -> None:
        self.buffers: list[dict[int, memoryview]] = [{} for _ in tensors]
        self.copied: list[set[int]] = [set() for _ in tensors]
        self.totals = [plan.expected for plan in tensors]
        """Elements of each tensor as far as they are known."""
        self.scalars: Scalars = {}
        self._plans = tensors

    def has(self, tensor: int, chunk: int) -> bool:
        if self.mapped is not None:
            return self.pieces is None or chunk < self.pieces
        return chunk in self.buffers[tensor] or chunk in self.copied[tensor]

    @property
    def complete(self) -> bool:
        if self.mapped is not None:
            return self.pieces is None
        for plan, total, buffers, copied in zip(self._plans, self.totals, self.buffers, self.copied, strict=True):
            if total is None or len(buffers) + len(copied) < plan.count(total):
                return False
        return True

    def assemble(self) -> int:
        """Copy what has come into tensors of its own; the bytes that this frees."""
        if self.mapped is not None:
            return 0
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

    def part(self, chunk: int, start: int, stop: int) -> Tensor:
        """One chunk of the first tensor, without a copy."""
        if self.mapped is not None:
            return cut(self.mapped[0], start, stop)
        return from_buffer(self.buffers[0][chunk], self._plans[0].spec.dtype)

    def payload(self) -> Payload:
        whole = self.assembled if self.mapped is None else self.mapped
        assert whole is not None
        tensors = {plan.name: tensor for plan, tensor in zip(self._plans, whole, strict=True)}
        numbers = {name: value for name, value in self.scalars.items() if not isinstance(value, str)}
        return Payload(tensors, numbers)

    def waiting_bytes(self) -> int:
        waiting = 0
        for buffers in self.buffers:
            for buffer in buffers.values():
                waiting += buffer.nbytes + MESSAGE_COST
        return waiting
