"""Places where the model may live so that sending it costs no copy: one may be read while the other fills."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.parts import Schema
from decentnode.communication.path import Path
from decentnode.communication.receive.staging import Leases
from decentnode.communication.run_state import RunState

LEASE_POLL_SECONDS = 100e-6
PRIVATE_PLACES = 2
"""Places of nodes without a publish buffer."""


class ModelSlots:
    """The places of one generation of members: a path's `model_slots` where there are any, else private memory. Used
    from the training thread."""

    def __init__(
        self, schema: Schema, leases: Leases, owner: Path | None, status: RunState, hurry: Callable[[], None]
    ) -> None:
        """schema: of phase 0. owner: the path with `model_slots`, where there is one. hurry: asks all peers now what
        they have of what was sent."""
        self.sent_to: tuple[int, ...] = ()
        """Who may still read what was sent last."""
        self._schema, self._owner, self._status, self._leases = schema, owner, status, leases
        self._leases.hurry = hurry
        self._places: list[Tensor] = []
        self._late = False
        """Whether leases on private places were once waited for in vain, and still are held."""

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        """What `Communication.acquire_slot` does."""
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
            if owner is not None:
                slot = owner.acquire_slot(current, clock.now() + self._status.patience(timeout_seconds))
                place = None if slot is None else self._places[slot]
            else:
                place = self._private(current, clock.now() + self._status.patience(timeout_seconds))
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
            if self._late or clock.now() > deadline or self._status.regrouping:
                self._late = True
                return None
            if not hurried:
                self._leases.hurry()
                hurried = True
            clock.sleep(LEASE_POLL_SECONDS)

    def lease(self, tensor: Tensor) -> object:
        """For what is sent from such a place: it may not change until the lease is dropped. None for anything else."""
        for place in self._places:
            if place.data_ptr() == tensor.data_ptr() and tensor.numel():
                return self._leases.take(place)
        return None
