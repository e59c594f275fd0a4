"""Checks the shapes of arriving chunks and slots against the schemas of the run."""

from __future__ import annotations

from torch import Tensor

from decentnode.communication.parts import Schema
from decentnode.communication.receive.chunking import TensorPlan, plans
from decentnode.communication.receive.partial_payload import SlotPayload, sliced
from decentnode.errors import PeerFault
from decentnode.wire.messages import Chunk


class PayloadShapes:
    """The shapes of the payloads of one run, by phase."""

    def __init__(self, schemas: tuple[Schema, ...], chunk_bytes: int) -> None:
        self.plans = tuple(plans(schema, chunk_bytes) for schema in schemas)
        self._fixed_totals = tuple(_packed([plan.expected for plan in each]) for each in self.plans)
        """The sizes that every payload has, packed as in doorbells; None if payloads may differ."""
        self._fixed_bytes = tuple(sum(p.spec.max_elements * p.spec.dtype.itemsize for p in each) for each in self.plans)

    def check(self, message: Chunk, buffer: memoryview) -> None:
        """Raises PeerFault if a chunk does not fit the schema."""
        if message.phase >= len(self.plans) or message.tensor >= len(self.plans[message.phase]):
            raise PeerFault("wrong_shape", f"tensor {message.tensor} of phase {message.phase}")
        plan = self.plans[message.phase][message.tensor]
        if not plan.accepts(message.total) or message.chunk >= plan.count(message.total):
            raise PeerFault("wrong_shape", f"{plan.name}: chunk {message.chunk} of {message.total} elements")
        start, stop = plan.bounds(message.chunk, message.total)
        if buffer.nbytes != (stop - start) * plan.spec.dtype.itemsize:
            raise PeerFault("wrong_size", f"{plan.name}: {buffer.nbytes} bytes for {stop - start} elements")

    def set_tensors(self, payload: SlotPayload, totals: bytes) -> int:
        """Sets a payload's tensors, cut to the lengths that a doorbell announced. Returns its size in bytes. totals:
        elements of each tensor, 8 bytes each. Raises PeerFault if the schema does not allow these lengths."""
        phase = payload.phase
        if phase >= len(self.plans):
            raise PeerFault("wrong_shape", f"phase {phase}")
        tensors, size = payload.reader.slots[phase][payload.slot], self._fixed_bytes[phase]
        if totals != self._fixed_totals[phase]:
            tensors = self._trimmed(tensors, phase, totals)
            size = sum(tensor.nbytes for tensor in tensors)
        payload.set_tensors(self.plans[phase], tensors)
        return size

    def _trimmed(self, tensors: list[Tensor], phase: int, totals: bytes) -> list[Tensor]:
        plans = self.plans[phase]
        lengths = [int.from_bytes(totals[i : i + 8], "little") for i in range(0, len(totals), 8)]
        if len(lengths) != len(plans) or not all(map(TensorPlan.accepts, plans, lengths)):
            raise PeerFault("wrong_shape", f"slot of {lengths} elements")
        return [sliced(tensor, 0, length) for tensor, length in zip(tensors, lengths, strict=True)]


def _packed(totals: list[int | None]) -> bytes | None:
    """Returns the totals in 8 bytes each; None if one is unknown."""
    known = [total.to_bytes(8, "little") for total in totals if total is not None]
    return b"".join(known) if len(known) == len(totals) else None
