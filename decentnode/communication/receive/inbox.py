"""The inbox of a node with threads: the I/O thread puts in what arrives, the thread that mixes waits and takes it out.

What is known is in `InboxState`; this is the lock around it, the clock, and the sleep of whoever waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Collected, ExchangeKey, Schema
from decentnode.communication.receive.arrival_wait import ArrivalWait
from decentnode.communication.receive.inbox_state import InboxState
from decentnode.communication.receive.partial_payload import PartialPayload, SlotPayload
from decentnode.communication.run_state import RunState, Wait
from decentnode.communication.waker import LONGEST_SLEEP_SECONDS
from decentnode.wire.bounds import Scalars
from decentnode.wire.messages import Chunk


class Inbox:
    """Payloads by (round, phase) and source. Any thread may call what puts something in; all else is the training
    thread's."""

    def __init__(
        self, schemas: tuple[Schema, ...], chunk_bytes: int, status: RunState, counters: Counters,
        consumed: Callable[[int, int], None], *, reject_non_finite: bool = False, device: torch.device | None = None,
    ) -> None:
        """consumed(uid, bytes): so many bytes of `uid`, headers included, are used up. device: where exchanges give
        their payloads; the CPU when None."""
        self.consumed, self.ready = consumed, status.notify
        self.ask: Callable[[list[int]], None] = lambda _uids: None
        """As `InboxPort.ask`."""
        self.state = InboxState(
            schemas, chunk_bytes, status, counters, self, reject_non_finite=reject_non_finite, device=device
        )
        """To be touched with `status.lock` held, as long as threads share it."""
        self.status = status
        self.schemas, self.plans, self.device = schemas, self.state.plans, self.state.placement.device

    @property
    def together(self) -> dict[ExchangeKey, frozenset[int]]:
        """As `Absences.together`."""
        return self.state.absences.together

    # -- any thread -------------------------------------------------------------------------------------------

    def put(self, message: Chunk, buffer: memoryview, now: float) -> None:
        """As `InboxState.put`."""
        with self.status.lock:
            self.state.put(message, buffer, now)

    def start_receive(
        self, key: ExchangeKey, source: int, tensors: list[Tensor], scalars: Scalars, let_go: Callable[[], None]
    ) -> bool:
        """As `InboxState.start_receive`."""
        with self.status.lock:
            return self.state.start_receive(key, source, tensors, scalars, let_go)

    def chunk_received(self, key: ExchangeKey, source: int, last: bool) -> None:
        """As `InboxState.chunk_received`."""
        with self.status.lock:
            self.state.chunk_received(key, source, last, clock.now())

    def put_slot(self, source: int, round: int, totals: bytes, payload: SlotPayload) -> int:
        """As `InboxState.put_slot`."""
        with self.status.lock:
            return self.state.put_slot(source, round, totals, payload, clock.now())

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey) -> None:
        """As `InboxState.skip`."""
        with self.status.lock:
            self.state.skip(source, first, last)

    def waits_itself(self, source: int, now: float) -> None:
        """As `InboxState.waits_itself`."""
        with self.status.lock:
            self.state.waits_itself(source, now)

    # -- training thread --------------------------------------------------------------------------------------

    def advance(self, round: int) -> None:
        """As `InboxState.advance`."""
        with self.status.lock:
            self.state.advance(round)

    def end(self, round: int) -> None:
        """As `InboxState.end`."""
        with self.status.lock:
            self.state.end(round)

    def reset(self, round: int) -> None:
        """As `InboxState.reset`."""
        with self.status.lock:
            self.state.reset(round)

    def finish(self, key: ExchangeKey) -> None:
        """As `InboxState.finish`."""
        with self.status.lock:
            self.state.finish(key)

    def release(self, chunk: int, sources: dict[int, PartialPayload]) -> None:
        """As `InboxState.release`."""
        with self.status.lock:
            self.state.release(chunk, sources)

    def wait(
        self, key: ExchangeKey, chunk: int, sources: list[int], timeout_seconds: float
    ) -> dict[int, PartialPayload]:
        """Blocking: those of `sources` that delivered `chunk`, which may be WHOLE; the wait is an `ArrivalWait`."""
        wait = ArrivalWait(self.state, key, chunk, sources, timeout_seconds)
        self.block(wait)
        return wait.arrived

    def look(self) -> None:
        """Take in what neighbors have announced; not blocking."""
        if self.status.doorbell is not None:
            self.status.doorbell.take_in()

    def has_later(self, round: int, source: int) -> bool:
        """As `InboxState.has_later`."""
        self.look()
        with self.status.lock:
            return self.state.has_later(round, source)

    def collect(self, channel: int, round: int | None) -> list[Collected]:
        """Take what has come into a mailbox; not blocking, but for copies."""
        with self.status.lock:
            taken = self.state.mailbox.take(channel, round)
        return self.state.owned(channel, taken)

    def block(self, wait: Wait) -> None:
        """Blocking until the wait is over."""
        status = self.status
        with status.lock:
            while not wait.step(now := clock.now()):
                status.wait(min(wait.deadline - now, LONGEST_SLEEP_SECONDS))
