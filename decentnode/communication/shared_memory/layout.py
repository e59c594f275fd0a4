"""The layout of a publish buffer: the positions of its header words, slots and tensors."""

from __future__ import annotations

from torch import Tensor

from decentnode.communication.parts import Schema
from decentnode.communication.receive.partial_payload import SLOTS
from decentnode.communication.shared_memory.segment import PAGE, Segment, placed, rounded
from decentnode.payload import TensorSpec

OFFER_BYTES, HANDLE_BYTES = 1024, 96
"""Room for an offer: for the memory handle, and for each event handle (64 bytes in CUDA)."""

Slots = list[list[list[Tensor]]]
"""[phase][slot][tensor]"""


class Layout:
    """The layout of a publish buffer. It depends on the run's schemas alone, so that both ends agree."""

    def __init__(self, schemas: tuple[Schema, ...], num_nodes: int, on_device: bool = False) -> None:
        """on_device: whether the slots lie in device memory (device_slots.py); the file then has an offer in their
        place."""
        self.schemas = schemas
        self.num_nodes = num_nodes
        self.phases = len(schemas)
        self.header_bytes = rounded(8 * self.words, PAGE)
        self.offsets: list[list[list[int]]] = []
        """[phase][slot][tensor]"""
        position = 0 if on_device else self.header_bytes
        for schema in schemas:
            slots = []
            for _ in range(SLOTS):
                starts, end = placed([s.max_elements * s.dtype.itemsize for s in schema.tensors.values()], position)
                slots.append(starts)
                position = rounded(end, PAGE)
            self.offsets.append(slots)
        self.slot_bytes = position
        """Where the last slot ends."""
        if on_device:
            handles = SLOTS * self.phases * (1 + num_nodes)
            position = self.header_bytes + rounded(OFFER_BYTES + HANDLE_BYTES * handles, PAGE)
        self.size = max(position, self.header_bytes + PAGE)

    @property
    def words(self) -> int:
        """Number of 8-byte words of the header: a magic number, a sequence number per slot, a counter per reader and
        slot."""
        return 1 + SLOTS * self.phases * (1 + self.num_nodes)

    def sequence(self, phase: int, slot: int) -> int:
        """Returns the index of the header word with the sequence number of a slot."""
        return 1 + SLOTS * phase + slot

    def counter(self, uid: int, phase: int, slot: int) -> int:
        """Returns the index of the header word in which `uid` counts its releases of a slot."""
        return 1 + SLOTS * (self.phases * (1 + uid) + phase) + slot

    def views(self, memory: Segment | Tensor) -> Slots:
        """Returns tensors [phase][slot][tensor] over a segment of `size` bytes, or over a tensor [slot_bytes] of
        bytes."""
        return [
            [
                [_view(memory, spec, start) for spec, start in zip(schema.tensors.values(), starts, strict=True)]
                for starts in slots
            ]
            for schema, slots in zip(self.schemas, self.offsets, strict=True)
        ]


def _view(memory: Segment | Tensor, spec: TensorSpec, start: int) -> Tensor:
    if isinstance(memory, Segment):
        return memory.tensor(spec.dtype, spec.max_elements, start)
    return memory[start : start + spec.max_elements * spec.dtype.itemsize].view(spec.dtype)
