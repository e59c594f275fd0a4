"""Places where the model may live so that sending it costs no copy: one may be read while the other fills."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from decentnode.communication.base import Schema
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_memory.path import SharedMemoryPath

LEASE_POLL_SECONDS = 100e-6
PRIVATE_PLACES = 2
"""Places of nodes without a publish buffer."""


class ModelSlots:
    """Of one generation of members: the publish buffer's slots of phase 0 where there is a publish buffer. Training
    thread's."""

    def __init__(self, schema: Schema, memory: SharedMemoryPath, status: RunState, hurry: Callable[[], None]) -> None:
        """schema: of phase 0. hurry: asks all peers now what they have of what was sent."""
        self.sent_to: tuple[int, ...] = ()
        """Who may still read what was sent last."""
        self._schema, self._memory, self._status = schema, memory, status
        self._leases = memory.leases
        self._leases.hurry = hurry
        self._places: list[Tensor] = []
        self._late = False
        """Whether leases on private places were once waited for in vain, and still are held."""

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        """What `Communication.acquire_slot` does."""
        schema = self._schema
        if not schema.elementwise or len(schema.tensors) != 1:
            return None
        in_board = bool(self._memory.model_slots())
        if not self._places:
            (spec,) = schema.tensors.values()
            self._places = self._memory.model_slots() or [
                torch.empty(schema.elements, dtype=spec.dtype) for _ in range(PRIVATE_PLACES)
            ]
        with self._status.waits_for(self.sent_to):
            if in_board:
                slot = self._memory.acquire_slot(current, timeout_seconds)
                place = None if slot is None else self._places[slot]
            else:
                place = self._private(current, time.monotonic() + self._status.patience(timeout_seconds))
        return torch.empty_like(current) if place is None else place

    def _private(self, current: Tensor, deadline: float) -> Tensor | None:
        """Blocking: another place than `current` from which no message is sent; None when there is none in time."""
        places = [place for place in self._places if place.data_ptr() != current.data_ptr()]
        hurried = False
        while True:
            for place in places:
                if not self._leases.held(place.data_ptr()):
                    self._late = False
                    return place
            self._status.raise_if_failed()
            if self._late or time.monotonic() > deadline or self._status.regrouping:
                self._late = True
                return None
            if not hurried:
                self._leases.hurry()
                hurried = True
            time.sleep(LEASE_POLL_SECONDS)

    def lease(self, tensor: Tensor) -> object:
        """For what is sent from such a place: it may not change until the lease is dropped. None for anything else."""
        for place in self._places:
            if place.data_ptr() == tensor.data_ptr() and tensor.numel():
                return self._leases.take(place)
        return None
