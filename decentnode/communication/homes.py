"""Places where the model may live so that sending it costs no copy: one may be read while the other fills."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from decentnode.communication.base import Schema
from decentnode.communication.memory import MemoryPath
from decentnode.communication.staging import Lease
from decentnode.communication.status import Status

LEASE_POLL_SECONDS = 100e-6


class Homes:
    """Of one generation of members: the board's slots of phase 0 where there is a board. Training thread's."""

    def __init__(self, schema: Schema, memory: MemoryPath, status: Status, hurry: Callable[[], None]) -> None:
        """schema: of phase 0. hurry: asks all peers now what they have of what was sent."""
        self.sent_to: tuple[int, ...] = ()
        """Who may still read what was sent last."""
        self._schema, self._memory, self._status, self._hurry = schema, memory, status, hurry
        self._places: list[Tensor] = []
        self._leases: dict[int, weakref.ref[Lease]] = {}

    def claim(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        """What `Communication.claim` does."""
        schema = self._schema
        if not schema.elementwise or len(schema.tensors) != 1:
            return None
        if not self._places:
            (spec,) = schema.tensors.values()
            self._places = self._memory.homes() or [torch.empty(schema.elements, dtype=spec.dtype) for _ in range(2)]
        deadline = time.monotonic() + timeout_seconds
        with self._status.waits_for(self.sent_to):
            for index, place in enumerate(self._places):
                if place.data_ptr() != current.data_ptr() and self._unused(index, deadline):
                    return place
        return torch.empty_like(current)

    def _unused(self, index: int, deadline: float) -> bool:
        """Blocking until nobody needs what was sent from a place."""
        lease = self._leases.get(index)
        if lease is not None and lease() is not None:
            self._hurry()
            while lease() is not None:
                self._status.raise_if_failed()
                if time.monotonic() > deadline or self._status.regrouping:
                    return False
                time.sleep(LEASE_POLL_SECONDS)
        return not self._memory.homes() or self._memory.wait_unread(index, max(0.0, deadline - time.monotonic()))

    def lease(self, tensor: Tensor) -> object:
        """For what is sent from such a place: it may not change until the lease is dropped. None for anything else."""
        for index, place in enumerate(self._places):
            if place.data_ptr() == tensor.data_ptr() and tensor.numel():
                held = self._leases.get(index)
                lease = held() if held is not None else None
                if lease is None:
                    lease = Lease()
                    self._leases[index] = weakref.ref(lease)
                return lease
        return None
