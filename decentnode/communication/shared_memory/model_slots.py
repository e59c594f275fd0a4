"""Places where the model may live so that sending it costs no copy: one may be read while the other fills."""

from __future__ import annotations

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.path import Path
from decentnode.communication.receive.staging import Leases
from decentnode.communication.run_state import RunState

LEASE_POLL_SECONDS = 100e-6
PRIVATE_PLACES = 2
"""Places of nodes without a publish buffer. While messages are still sent from all of them, the model lives in memory
of its own, from which nothing is leased: what leaves from there is copied."""


class ModelSlots:
    """The places of one generation of members: a path's `model_slots` where there are any, else private memory. Used
    from the training thread."""

    def __init__(
        self, schema: Schema, leases: Leases, owner: Path | None, status: RunState, counters: Counters
    ) -> None:
        """schema: of phase 0. owner: the path with `model_slots`, where there is one."""
        self.sent_to: tuple[int, ...] = ()
        """Who may still read what was sent last."""
        self._schema, self._owner, self._status, self._leases = schema, owner, status, leases
        self._counters = counters
        self._places: list[Tensor] = []
        self._late = False
        """Whether leases on private places were once waited for in vain, and still are held."""

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        """What `Communication.acquire_slot` does. What goes to the others next comes after this wait."""
        schema = self._schema
        if not schema.elementwise or len(schema.tensors) != 1:
            return None
        owner = self._owner if self._owner is not None and self._owner.model_slots else None
        if not self._places:
            (spec,) = schema.tensors.values()
            self._places = (owner.model_slots if owner is not None else []) or [
                torch.empty(schema.elements, dtype=spec.dtype) for _ in range(PRIVATE_PLACES)
            ]
        with self._status.waits_for(self.sent_to):
            deadline = clock.now() + self._status.hold_up(timeout_seconds)
            if owner is not None:
                slot = owner.acquire_slot(current, deadline)
                place = None if slot is None else self._places[slot]
            else:
                place = self._private(current, deadline)
        return torch.empty_like(current) if place is None else place

    def _private(self, current: Tensor, deadline: float) -> Tensor | None:
        """Blocking: another place than `current` from which no message is sent; None when there is none in time."""
        places = [place for place in self._places if place.data_ptr() != current.data_ptr()]
        began: float | None = None
        holders = set[int]()
        while True:
            free = next((place for place in places if not self._leases.held(place.data_ptr())), None)
            self._late = self._late and free is None
            self._status.raise_if_failed()
            if free is not None or self._late or clock.now() > deadline or self._status.regrouping:
                break
            if began is None:
                began = clock.now()
                self._leases.hurry()
            holders = self._leases.holders()
            clock.sleep(LEASE_POLL_SECONDS)
        if began is not None:
            self._status.held_up(clock.now() - began, holders, self._counters)
        self._late = free is None
        return free

    def lease(self, tensor: Tensor) -> object:
        """For what is sent from such a place: it may not change until the lease is dropped. None for anything else."""
        for place in self._places:
            if place.data_ptr() == tensor.data_ptr() and tensor.numel():
                return self._leases.take(place)
        return None
