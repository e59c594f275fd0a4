"""Places where the model may live so that sending it costs no copy: one may be read while the other fills."""

from __future__ import annotations

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.path import Path
from decentnode.communication.receive.staging import Leases
from decentnode.communication.run_state import RunFacts, Steps, Wait, blocking

LEASE_POLL_SECONDS = 100e-6
PRIVATE_PLACES = 2
"""Places of nodes without a publish buffer. While messages are still sent from all of them, the model lives in memory
of its own, from which nothing is leased: what leaves from there is copied."""


class PlaceWait:
    """The wait for a place from which no message is sent (`run_state.Wait`), looked at LEASE_POLL_SECONDS apart, as
    nobody says when the last lease is dropped."""

    def __init__(
        self, places: list[Tensor], current: Tensor, leases: Leases, facts: RunFacts, counters: Counters,
        *, deadline: float, late: bool,
    ) -> None:
        """places: `current` is none of those to choose from. late: whether the last such wait was in vain; then this
        one gives up at once."""
        self._places = [place for place in places if place.data_ptr() != current.data_ptr()]
        self._leases, self._facts, self._counters, self._late = leases, facts, counters, late
        self._began: float | None = None
        self._holders = set[int]()
        self.deadline = deadline
        self.place: Tensor | None = None
        """Once it is over; None where there was none in time."""

    def step(self, now: float) -> bool:
        """Raises what every wait raises once the run has failed."""
        self.place = next((place for place in self._places if not self._leases.held(place.data_ptr())), None)
        self._facts.raise_if_failed()
        if self.place is not None or self._late or now >= self.deadline or self._facts.regrouping:
            if self._began is not None:
                self._facts.held_up(now - self._began, self._holders, self._counters)
            return True
        if self._began is None:
            self._began = now
            self._leases.hurry()
        self._holders = self._leases.holders()
        return False


def poll(wait: Wait) -> None:
    """Blocking until the wait is over."""
    while not wait.step(clock.now()):
        clock.sleep(LEASE_POLL_SECONDS)


class ModelSlots:
    """The places of one generation of members: a path's `model_slots` where there are any, else private memory. Used
    from the training thread."""

    def __init__(
        self, schema: Schema, leases: Leases, owner: Path | None, status: RunFacts, counters: Counters
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
        return blocking(self.steps(current, timeout_seconds), poll)

    def steps(self, current: Tensor, timeout_seconds: float) -> Steps[Tensor | None]:
        """As `acquire_slot`, with the wait for private memory handed out; a path with slots of its own blocks."""
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
                wait = PlaceWait(
                    self._places, current, self._leases, self._status, self._counters, deadline=deadline,
                    late=self._late,
                )
                if not wait.step(clock.now()):
                    yield wait
                place = wait.place
                self._late = place is None
        return torch.empty_like(current) if place is None else place

    def lease(self, tensor: Tensor) -> object:
        """For what is sent from such a place: it may not change until the lease is dropped. None for anything else."""
        for place in self._places:
            if place.data_ptr() == tensor.data_ptr() and tensor.numel():
                return self._leases.take(place)
        return None
