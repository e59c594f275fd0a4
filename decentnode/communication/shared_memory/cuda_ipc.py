"""Slots in GPU memory that is shared with other processes on the same GPU: neighbors mix straight from it, without a
copy between nodes.

Handles of memory and events travel as plain bytes in the publish buffer's file; nothing is pickled. Memory is exported
once, at the start (docs/explanation/transports.rst). Written from torch 2.13's sources (multiprocessing/reductions.py)
and from CUDA's documentation of interprocess communication; it has run on no GPU yet. `_share_cuda_` and
`_new_shared_cuda` are private functions of torch: they are called here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgpack
import torch

from decentnode.communication.receive.partial_payload import SLOTS
from decentnode.communication.shared_memory.device_slots import DeviceMemory, ExportedSlots, ImportedSlots
from decentnode.communication.shared_memory.layout import Layout
from decentnode.errors import EnvironmentFault, PeerFault

EVENT_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""


class CudaExportedSlots(ExportedSlots):
    def __init__(self, layout: Layout, device: torch.device, readers: Collection[int]) -> None:
        """Raises RuntimeError if the GPU's memory cannot be shared."""
        self._device = device
        with torch.cuda.device(device):
            self._memory = torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=device)
            torch.cuda.current_stream(device).synchronize()  # the zeros are written before a reader maps the memory
            self.slots = layout.views(self._memory)
            keys = [(phase, slot) for phase in range(layout.phases) for slot in range(SLOTS)]
            self._write_events = {key: torch.cuda.Event(interprocess=True) for key in keys}
            self._read_events = {
                (*key, uid): torch.cuda.Event(interprocess=True) for key in keys for uid in sorted(readers)
            }
            shared: Any = self._memory.untyped_storage()._share_cuda_()
            self.offer = msgpack.packb([
                list(shared[1:]), [[*key, event.ipc_handle()] for key, event in self._write_events.items()],
                [[*key, event.ipc_handle()] for key, event in self._read_events.items()],
            ])

    def may_write(self, phase: int, slot: int, readers: Collection[int]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for uid in readers:
            self._read_events[phase, slot, uid].wait(stream)

    def written(self, phase: int, slot: int) -> None:
        self._write_events[phase, slot].record(torch.cuda.current_stream(self._device))

    def idle(self) -> bool:
        return all(event.query() for event in (*self._write_events.values(), *self._read_events.values()))


class CudaImportedSlots(ImportedSlots):
    def __init__(self, offer: bytes, layout: Layout, device: torch.device, uid: int) -> None:
        """Raises ValueError for an invalid offer, RuntimeError if the GPU's driver refuses it."""
        self._device = device
        memory, write_handles, read_handles = unpack_offer(offer, layout, uid)
        with torch.cuda.device(device):
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *memory)
            self._memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (layout.slot_bytes,), (1,))
            self.slots = layout.views(self._memory)
            opened = torch.cuda.Event.from_ipc_handle
            self._write_events = {key: opened(device, handle) for key, handle in write_handles.items()}
            self._read_events = {key: opened(device, handle) for key, handle in read_handles.items()}

    def enter(self, phase: int, slot: int) -> None:
        self._write_events[phase, slot].wait(torch.cuda.current_stream(self._device))

    def leave(self, phase: int, slot: int) -> None:
        self._read_events[phase, slot].record(torch.cuda.current_stream(self._device))


Handles = dict[tuple[int, int], bytes]


def unpack_offer(offer: bytes, layout: Layout, uid: int) -> tuple[list[Any], Handles, Handles]:
    """Returns (arguments of `_new_shared_cuda` after the device, handles of the `written` events, handles of the `left`
    events of the reader `uid`).

    Raises ValueError for an offer that does not fit this layout, whose sizes come from the local schemas.
    """
    entries = layout.phases * SLOTS * (1 + layout.num_nodes)
    value = msgpack.unpackb(offer, max_bin_len=512, max_array_len=max(64, entries), max_map_len=0, max_ext_len=0)
    try:
        memory, written, left = value
        handle, size, offset, counter, counter_offset, event, synced = memory
        kinds = (bytes, int, int, bytes, int, bytes, bool)
        write_handles = {(phase, slot): handle for phase, slot, handle in written}
        read_handles = {(phase, slot): handle for phase, slot, reader, handle in left if reader == uid}
    except (TypeError, ValueError) as error:
        raise ValueError(f"an offer must have memory and events: {error}") from error
    fields = (handle, size, offset, counter, counter_offset, event, synced)
    if any(type(each) is not kind for each, kind in zip(fields, kinds, strict=True)) or offset < 0:
        raise ValueError(f"an offer's fields must be {[kind.__name__ for kind in kinds]}")
    if size != layout.slot_bytes:
        raise ValueError(f"memory must have {layout.slot_bytes} bytes, got {size}")
    keys = {(phase, slot) for phase in range(layout.phases) for slot in range(SLOTS)}
    handles = [*write_handles.values(), *read_handles.values()]
    if write_handles.keys() != keys or read_handles.keys() != keys or any(len(each) != EVENT_BYTES for each in handles):
        raise ValueError("an offer must have an event of 64 bytes for every slot")
    return list(fields), write_handles, read_handles


class CudaMemory(DeviceMemory):
    """GPU memory shared between processes on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def export_slots(self, layout: Layout, readers: Collection[int]) -> ExportedSlots:
        try:
            return CudaExportedSlots(layout, self._device, readers)
        except RuntimeError as error:
            raise EnvironmentFault(f"{self._device} lends no memory: {error}") from error

    def import_slots(self, offer: bytes, layout: Layout, uid: int) -> ImportedSlots:
        try:
            return CudaImportedSlots(offer, layout, self._device, uid)
        except (ValueError, RuntimeError, msgpack.UnpackException) as error:
            raise PeerFault("no_board", f"{self._device} maps no memory: {error}") from error
