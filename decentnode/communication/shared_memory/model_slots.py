"""Slots in which the model may live so that sending it needs no copy: one may be read while the other is written."""

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
PRIVATE_SLOTS = 2
"""Slots of nodes without a publish buffer. While messages are still sent from all of them, the model lives in memory of
its own without a lease, and what is sent from there is copied."""


class SlotWait:
    """The wait for a slot from which no message is being sent (`run_state.Wait`). It is polled every
    LEASE_POLL_SECONDS, because nothing signals the release of the last lease."""

    def __init__(
        self, slots: list[Tensor], current: Tensor, leases: Leases, facts: RunFacts, counters: Counters,
        *, deadline: float, last_wait_failed: bool,
    ) -> None:
        """slots: all slots; `current` is not a candidate. last_wait_failed: whether the previous wait timed out; this
        one then ends at once."""
        self._slots = [place for place in slots if place.data_ptr() != current.data_ptr()]
        self._leases, self._facts, self._counters, self._last_wait_failed = leases, facts, counters, last_wait_failed
        self._began: float | None = None
        self._holders = set[int]()
        self.deadline = deadline
        self.place: Tensor | None = None
        """After the wait: the free slot; None if none became free in time."""

    def step(self, now: float) -> bool:
        """See `run_state.Wait.step`. Raises the run's failure if the run has failed."""
        self.place = next((place for place in self._slots if not self._leases.held(place.data_ptr())), None)
        self._facts.raise_if_failed()
        if self.place is not None or self._last_wait_failed or now >= self.deadline or self._facts.regrouping:
            if self._began is not None:
                self._facts.record_send_delay(now - self._began, self._holders, self._counters)
            return True
        if self._began is None:
            self._began = now
            self._leases.request_acks()
        self._holders = self._leases.holders()
        return False


def block_polling(wait: Wait) -> None:
    """Blocks until the wait is over."""
    while not wait.step(clock.now()):
        clock.sleep(LEASE_POLL_SECONDS)


class ModelSlots:
    """The model slots of one membership generation: a path's `model_slots` if there are any, else private memory. Used
    from the training thread."""

    def __init__(
        self, schema: Schema, leases: Leases, owner: Path | None, facts: RunFacts, counters: Counters
    ) -> None:
        """schema: of phase 0. owner: the path with `model_slots`, if there is one."""
        self.sent_to: tuple[int, ...] = ()
        """Nodes that may still read what was sent last."""
        self._schema, self._owner, self._facts, self._leases = schema, owner, facts, leases
        self._counters = counters
        self._slots: list[Tensor] = []
        self._last_wait_failed = False
        """Whether a wait for leases on private slots timed out, and they are still held."""

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        """Implements `Communication.acquire_slot`. The next payloads to other nodes are delayed by this wait."""
        return blocking(self.steps(current, timeout_seconds), block_polling)

    def steps(self, current: Tensor, timeout_seconds: float) -> Steps[Tensor | None]:
        """Returns the steps of `acquire_slot`: yields the wait for private memory; a path with slots of its own
        blocks."""
        schema = self._schema
        if not schema.elementwise or len(schema.tensors) != 1:
            return None
        owner = self._owner if self._owner is not None and self._owner.model_slots else None
        if not self._slots:
            (spec,) = schema.tensors.values()
            self._slots = (owner.model_slots if owner is not None else []) or [
                torch.empty(schema.elements, dtype=spec.dtype) for _ in range(PRIVATE_SLOTS)
            ]
        with self._facts.waits_for(self.sent_to):
            deadline = clock.now() + self._facts.remaining_send_delay(timeout_seconds)
            if owner is not None:
                slot = owner.acquire_slot(current, deadline)
                place = None if slot is None else self._slots[slot]
            else:
                wait = SlotWait(
                    self._slots, current, self._leases, self._facts, self._counters, deadline=deadline,
                    last_wait_failed=self._last_wait_failed,
                )
                if not wait.step(clock.now()):
                    yield wait
                place = wait.place
                self._last_wait_failed = place is None
        return torch.empty_like(current) if place is None else place

    def lease(self, tensor: Tensor) -> object:
        """Returns a lease to hold while a message is sent from one of these slots, which must not change until it is
        dropped. Returns None for any other memory."""
        for place in self._slots:
            if place.data_ptr() == tensor.data_ptr() and tensor.numel():
                return self._leases.take(place)
        return None
