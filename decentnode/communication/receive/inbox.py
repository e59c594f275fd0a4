"""The inbox of a node with threads: the I/O thread puts in what arrives; the thread that mixes waits and takes it out.

`InboxState` holds the state; this file adds the lock, the clock, and blocking waits.
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
    """The payloads that arrived, by (round, phase) and source. Any thread may call the methods that put something in;
    all others are the training thread's."""

    def __init__(
        self, schemas: tuple[Schema, ...], chunk_bytes: int, run_state: RunState, counters: Counters,
        consumed: Callable[[int, int], None], *, reject_non_finite: bool = False, device: torch.device | None = None,
    ) -> None:
        """consumed(uid, bytes): called when this many bytes of `uid`, headers included, were used. device: the device
        of payloads that exchanges yield; the CPU when None."""
        self.consumed, self.ready = consumed, run_state.notify
        self.ask: Callable[[list[int]], None] = lambda _uids: None
        """See `InboxPort.ask`."""
        self.state = InboxState(
            schemas, chunk_bytes, run_state, counters, self, reject_non_finite=reject_non_finite, device=device
        )
        """Accessed only with `run_state.lock` held while threads share it."""
        self.run_state = run_state
        self.schemas, self.plans, self.device = schemas, self.state.plans, self.state.placement.device

    @property
    def served_together(self) -> dict[ExchangeKey, frozenset[int]]:
        """See `Absences.served_together`."""
        return self.state.absences.served_together

    # -- any thread -------------------------------------------------------------------------------------------

    def put(self, message: Chunk, buffer: memoryview, now: float) -> None:
        """See `InboxState.put`."""
        with self.run_state.lock:
            self.state.put(message, buffer, now)

    def start_receive(
        self, key: ExchangeKey, source: int, tensors: list[Tensor], scalars: Scalars, release: Callable[[], None]
    ) -> bool:
        """See `InboxState.start_receive`."""
        with self.run_state.lock:
            return self.state.start_receive(key, source, tensors, scalars, release)

    def chunk_received(self, key: ExchangeKey, source: int, last: bool) -> None:
        """See `InboxState.chunk_received`."""
        with self.run_state.lock:
            self.state.chunk_received(key, source, last, clock.now())

    def put_slot(self, source: int, round: int, totals: bytes, payload: SlotPayload) -> int:
        """See `InboxState.put_slot`."""
        with self.run_state.lock:
            return self.state.put_slot(source, round, totals, payload, clock.now())

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey) -> None:
        """See `InboxState.skip`."""
        with self.run_state.lock:
            self.state.skip(source, first, last)

    def note_waiting_report(self, source: int, now: float) -> None:
        """See `InboxState.note_waiting_report`."""
        with self.run_state.lock:
            self.state.note_waiting_report(source, now)

    # -- training thread --------------------------------------------------------------------------------------

    def advance(self, round: int) -> None:
        """See `InboxState.advance`."""
        with self.run_state.lock:
            self.state.advance(round)

    def end(self, round: int) -> None:
        """See `InboxState.end`."""
        with self.run_state.lock:
            self.state.end(round)

    def reset(self, round: int) -> None:
        """See `InboxState.reset`."""
        with self.run_state.lock:
            self.state.reset(round)

    def finish(self, key: ExchangeKey) -> None:
        """See `InboxState.finish`."""
        with self.run_state.lock:
            self.state.finish(key)

    def release(self, chunk: int, sources: dict[int, PartialPayload]) -> None:
        """See `InboxState.release`."""
        with self.run_state.lock:
            self.state.release(chunk, sources)

    def wait(
        self, key: ExchangeKey, chunk: int, sources: list[int], timeout_seconds: float
    ) -> dict[int, PartialPayload]:
        """Blocks as an `ArrivalWait` does. Returns the payloads of those of `sources` that delivered `chunk`, which may
        be WHOLE."""
        wait = ArrivalWait(self.state, key, chunk, sources, timeout_seconds)
        self.block(wait)
        return wait.arrived

    def look(self) -> None:
        """Processes what neighbors have announced. Does not block."""
        if self.run_state.doorbell is not None:
            self.run_state.doorbell.take_in()

    def has_later(self, round: int, source: int) -> bool:
        """See `InboxState.has_later`."""
        self.look()
        with self.run_state.lock:
            return self.state.has_later(round, source)

    def collect(self, channel: int, round: int | None) -> list[Collected]:
        """Takes the complete payloads out of a mailbox. Blocks only while it copies them."""
        with self.run_state.lock:
            taken = self.state.mailbox.take(channel, round)
        return self.state.copy_out(channel, taken)

    def block(self, wait: Wait) -> None:
        """Blocks until the wait is over."""
        run_state = self.run_state
        with run_state.lock:
            while not wait.step(now := clock.now()):
                run_state.wait(min(wait.deadline - now, LONGEST_SLEEP_SECONDS))
