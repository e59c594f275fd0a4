"""Pinned host memory for copies between a GPU and the code that sends and receives bytes. It is allocated once, and
copies run on streams of their own, beside the computation.

Outgoing: a payload is copied chunk by chunk into a slot; chunk k leaves while chunk k + 1 is still being copied. A slot
is free again when no lease on it is held: a message holds one until its peer has acknowledged it, as it may have to be
sent again. Incoming: a piece is copied into the next of a few slots, and from there to the GPU while the next slot is
filled (docs/explanation/transports.rst).
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from decentnode.communication.receive.chunking import TensorPlan
from decentnode.payload import TensorSpec
from decentnode.tensors import as_bytes

OUT_SLOTS, IN_SLOTS = 2, 4
"""Outgoing payloads in flight at a time; incoming pieces of IN_BYTES in flight."""
IN_BYTES = 4 << 20


class Mark(abc.ABC):
    """The completion event of a queued copy."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Blocks until the copy is complete."""


class Copies(abc.ABC):
    """Copies between a device and host memory, in queues of their own. Used from the training thread."""

    @abc.abstractmethod
    def host(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocates host memory that copies run at full speed to and from. May wait for the device."""

    @abc.abstractmethod
    def fetch(self, out: Tensor, source: Tensor) -> Mark:
        """Queues a copy from the device to the host, after what the current queue has done to `source` so far. Does not
        block."""

    @abc.abstractmethod
    def blank(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocates a tensor on the device to `upload` into."""

    @abc.abstractmethod
    def upload(self, out: Tensor, source: Tensor) -> Mark:
        """Queues a copy from the host to the device, into a tensor of `blank` or a part of it; later work of the
        current queue waits for it. Does not block."""


class CudaCopies(Copies):
    """Copies between a CUDA device and the host. Written from torch's documentation; it has run on no GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def host(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=True)

    def fetch(self, out: Tensor, source: Tensor) -> Mark:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            out.copy_(source, non_blocking=True)
            source.record_stream(self._out)
            return _CudaMark(self._out)

    def blank(self, elements: int, dtype: torch.dtype) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._in):  # so that the memory is not still read by earlier work of the current stream
            out = torch.empty(elements, dtype=dtype, device=self._device)
        out.record_stream(current)
        return out

    def upload(self, out: Tensor, source: Tensor) -> Mark:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._in):
            out.copy_(source, non_blocking=True)
            mark = _CudaMark(self._in)
        current.wait_event(mark.event)
        return mark


class _CudaMark(Mark):
    def __init__(self, stream: Any) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class Lease:
    """Held by every message whose bytes lie in a slot, or in the model itself."""


class Leases:
    """Leases on memory in which the model lives: its bytes must not change while a lease is held."""

    def __init__(self) -> None:
        self.request_acks: Callable[[], None] = lambda: None
        """Asks all peers to acknowledge now what they have received."""
        self.unacked_peers: list[Callable[[], Iterable[int]]] = []
        """One function per channel by which messages leave; each returns the peers that have not yet acknowledged
        everything sent."""
        self._lease_by_address: dict[int, weakref.ref[Lease]] = {}

    def take(self, place: Tensor) -> Lease:
        """Returns the lease on this memory; all messages that are sent from it at a time share one."""
        address = place.data_ptr()
        found = self._lease_by_address.get(address)
        lease = found() if found is not None else None
        if lease is None:
            lease = Lease()
            self._lease_by_address[address] = weakref.ref(lease)
        return lease

    def holders(self) -> set[int]:
        """Returns the peers because of which leases are held."""
        return {uid for unacked_peers in self.unacked_peers for uid in unacked_peers()}

    def held(self, address: int) -> bool:
        """Returns whether a message is still sent from the memory at this address."""
        found = self._lease_by_address.get(address)
        return found is not None and found() is not None


class Fetched:
    """A tensor that is being copied to the host."""

    def __init__(self, plan: TensorPlan, host: Tensor, marks: Sequence[Mark], lease: object) -> None:
        self.lease = lease
        self._plan, self._host, self._marks = plan, host, marks

    def piece(self, chunk: int) -> memoryview:
        """Blocks until this chunk has been copied. Returns its bytes, which stay unchanged while the lease is held."""
        self._marks[chunk].wait()
        return as_bytes(self._host[slice(*self._plan.bounds(chunk, self._host.numel()))])


class _Slot:
    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.lease: Callable[[], object | None] = lambda: None


class Staging:
    """One node's slots: those for arriving pieces are allocated at once, those for outgoing payloads by `take`."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._out: dict[tuple[int, torch.dtype], list[_Slot]] = {}
        self._in: list[tuple[Tensor, Mark | None]]
        self._in = [(copies.host(IN_BYTES, torch.uint8), None) for _ in range(IN_SLOTS)]
        self._next = 0

    def take(self, specs: Sequence[TensorSpec]) -> None:
        """Allocates OUT_SLOTS slots for each size and dtype of outgoing tensors that has none yet. specs: of all
        outgoing tensors. May wait for the device."""
        for kind in dict.fromkeys((spec.max_elements, spec.dtype) for spec in specs if spec.max_elements):
            if kind not in self._out:
                self._out[kind] = [_Slot(self._copies.host(*kind)) for _ in range(OUT_SLOTS)]

    def fetch(self, plan: TensorPlan, tensor: Tensor) -> Fetched | None:
        """Queues the copies of all chunks of a tensor of `plan`. Returns None while every slot is leased. Does not
        block.

        The tensor may change once its last piece was requested.
        """
        slots = self._out.get((plan.spec.max_elements, plan.spec.dtype), [])
        slot = next((slot for slot in slots if slot.lease() is None), None)
        if slot is None:
            return None
        lease, total = Lease(), tensor.numel()
        slot.lease = weakref.ref(lease)
        host = slot.host[:total]
        parts = [slice(*plan.bounds(chunk, total)) for chunk in range(plan.count(total))]
        return Fetched(plan, host, [self._copies.fetch(host[part], tensor[part]) for part in parts], lease)

    def upload(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a host tensor on the device; the tensor may change as soon as this returns. Blocks only
        while all slots are in use."""
        per_slot = IN_BYTES // tensor.element_size()
        out = self._copies.blank(tensor.numel(), tensor.dtype)
        for start in range(0, tensor.numel(), per_slot):
            piece = tensor[start : start + per_slot]
            slot, mark = self._in[self._next]
            if mark is not None:
                mark.wait()
            home = slot[: piece.nbytes].view(piece.dtype).copy_(piece)
            self._in[self._next] = slot, self._copies.upload(out[start : start + per_slot], home)
            self._next = (self._next + 1) % len(self._in)
        return out


def staging_of(device: torch.device) -> Staging | None:
    """Returns the staging memory for a GPU; None for another device."""
    return Staging(CudaCopies(device)) if device.type == "cuda" else None
