"""The state of an inbox, without I/O: which payloads of which rounds have arrived, which sources are missing, and until
when.

It has no lock, clock or thread: `receive/inbox.py` serializes the calls and blocks. Times (`now`) are seconds of any
monotonic clock.

The class is long because every arrival and every wait changes the same state. Payloads, their shapes, absences and
waits have files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import Tensor

from decentnode.communication.counters import Counters
from decentnode.communication.parts import Collected, ExchangeKey, Schema
from decentnode.communication.receive.absences import SUM, Absences
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.receive.mailbox import Mailbox, Taken, copy_out
from decentnode.communication.receive.partial_payload import (
    SLOTS,
    ChunkedPayload,
    MappedPayload,
    PartialPayload,
    SlotPayload,
    non_finite_sources,
)
from decentnode.communication.receive.payload_shapes import PayloadShapes
from decentnode.communication.receive.placement import DevicePlacement
from decentnode.communication.run_state import RunFacts
from decentnode.errors import PeerFault
from decentnode.wire.bounds import Scalars
from decentnode.wire.messages import Chunk

WHOLE = -1
"""In place of the number of a chunk: the whole payload."""


class InboxPort(Protocol):
    """The calls of an inbox to its environment, made from within methods of `InboxState`."""

    def consumed(self, uid: int, size: int) -> None:
        """Reports that `size` bytes of `uid`, headers included, were used, so that it may send more."""

    def ask(self, uids: list[int]) -> None:
        """Asks these neighbors, whose payloads are overdue, whether they are themselves waiting for others. Does not
        block. Each answer calls `InboxState.note_waiting_report`."""

    def ready(self) -> None:
        """Reports that everything that the last unfinished `ArrivalWait` waits for has arrived, or that something else
        may end it."""


class InboxState:
    """Payloads by (round, phase) and source, from the arrival of their first chunk until they are mixed."""

    def __init__(
        self, schemas: tuple[Schema, ...], chunk_bytes: int, facts: RunFacts, counters: Counters, port: InboxPort, *,
        reject_non_finite: bool = False, device: torch.device | None = None,
    ) -> None:
        """device: the device of payloads that exchanges yield; the CPU when None."""
        self.placement, self.absences = DevicePlacement(device), Absences(facts)
        self.schemas = schemas
        self.reject_non_finite = reject_non_finite
        self._shapes = PayloadShapes(schemas, chunk_bytes)
        self.plans = self._shapes.plans
        self.facts = facts
        self.counters = counters
        self._port = port
        self.mailbox = Mailbox(schemas, self.plans, port.consumed)
        """The channels that are mailboxes; the rest of this class is about the other channels."""
        self.incoming: dict[ExchangeKey, dict[int, PartialPayload]] = {}
        self._floor = 0
        self._end_round = math.inf
        """This node takes part in no round from this one on, so nothing of these rounds is kept."""
        self._current_round = -1
        """The current round."""
        self.reported_waiting: dict[int, float] = {}
        """By source: when it last reported, in the current round, that it is itself waiting for others."""
        self._finished: set[ExchangeKey] = set()
        self._wanted: set[int] = set()
        """Sources that are waited for."""
        self._spare = 0
        """Once no more than this many of them are missing, `InboxPort.ready` is called for each further arrival."""
        self._last_late: dict[int, ExchangeKey] = {}
        """By source: the payload that was last counted as late."""
        self._wanted_chunk: tuple[ExchangeKey, int] = ((-1, 0), 0)
        """(key, chunk) that is waited for; chunk may be WHOLE."""

    @property
    def floor(self) -> int:
        """Payloads of rounds below it are stale. Only `advance` and `reset` change it."""
        return self._floor

    def has_later(self, round: int, source: int) -> bool:
        """Returns whether anything of a round after `round` has arrived from a source."""
        return any(key[0] > round and source in sources for key, sources in self.incoming.items())

    # -- arrivals ---------------------------------------------------------------------------------------------

    def put(self, message: Chunk, buffer: memoryview, now: float) -> None:
        """Takes one chunk and keeps its buffer. Raises PeerFault if the chunk does not fit the schema, is a duplicate
        or is stale."""
        self._shapes.check(message, buffer)
        key = (message.round, message.phase)
        self.facts.silent.discard(message.source)
        if self.mailbox.is_mailbox(message.phase):
            self._wake_mailbox_reader(self.mailbox.put(message, buffer, now))
            return
        if message.round < self._floor or key in self._finished:
            self._count_late(key, message.source)
            raise PeerFault("stale_round", f"round {message.round} from {message.source}")
        if message.round >= self._end_round:
            self._port.consumed(message.source, buffer.nbytes + MESSAGE_COST)
            return
        tensors = self.plans[message.phase]
        sources = self.incoming.setdefault(key, {})
        incoming = sources.get(message.source)
        if incoming is None:
            incoming = sources[message.source] = ChunkedPayload(tensors)
        if not isinstance(incoming, ChunkedPayload):
            raise PeerFault("duplicate_chunk", f"round {message.round} from {message.source}")
        incoming.put(message, buffer, now)
        if not self.schemas[message.phase].elementwise:
            self._assemble(key, message.source, incoming)
        self._wake(key, message.source, incoming)

    def _count_late(self, key: ExchangeKey, source: int) -> None:
        """Counts a payload of which something arrived after its exchange was over; once per payload, however many
        chunks arrive."""
        if self._last_late.get(source) != key:
            self._last_late[source] = key
            self.counters.edge(source).late_payloads += 1

    def start_receive(
        self, key: ExchangeKey, source: int, tensors: list[Tensor], scalars: Scalars, release: Callable[[], None]
    ) -> bool:
        """Announces that the chunks of a payload will arrive in `tensors`, which the caller owns. Returns False if the
        payload is no longer wanted. release: called once nobody reads `tensors` any more; called immediately if this
        returns False."""
        payload = MappedPayload(self.plans[key[1]], tensors, scalars, release, chunks_received=0)
        if self.mailbox.is_mailbox(key[1]):
            return self.mailbox.begin(key, source, payload)
        sources = self.incoming.get(key, {})
        if key[0] < self._floor or key[0] >= self._end_round or key in self._finished or source in sources:
            if key[0] < self._end_round and source not in sources:
                self._count_late(key, source)
            release()
            return False
        self.incoming.setdefault(key, {})[source] = payload
        return True

    def chunk_received(self, key: ExchangeKey, source: int, last: bool, now: float) -> None:
        """Announces, after `start_receive`, that the next chunk in order has arrived. last: whether the whole payload
        has."""
        self.facts.silent.discard(source)
        if self.mailbox.is_mailbox(key[1]):
            self._wake_mailbox_reader(self.mailbox.chunk_received(key, source, last, now))
            return
        incoming = self.incoming.get(key, {}).get(source)
        if not isinstance(incoming, MappedPayload) or incoming.chunks_received is None:
            return
        incoming.chunks_received = None if last else incoming.chunks_received + 1
        incoming.arrived_at = now
        self._wake(key, source, incoming)

    def put_slot(self, source: int, round: int, totals: bytes, payload: SlotPayload, now: float) -> int:
        """Takes a payload in a neighbor's publish buffer. Returns its size in bytes. Raises PeerFault as `put` does.

        totals: elements of each tensor, 8 bytes each. If the payload is not kept, the slot is released immediately.
        """
        phase = payload.phase
        key = round, phase
        try:
            size = self._shapes.set_tensors(payload, totals)
            self.facts.silent.discard(source)
            if self.mailbox.is_mailbox(phase):
                self._wake_mailbox_reader(self.mailbox.put_slot(key, source, payload, now))
                return size
            if round < self._floor or key in self._finished:
                self._count_late(key, source)
                raise PeerFault("stale_round", f"round {round} from {source}")
            if round >= self._end_round:
                payload.release()
                return size
            sources = self.incoming.get(key)
            if sources is not None and source in sources:
                raise PeerFault("duplicate_chunk", f"round {round} from {source}")
            if len(self.incoming) >= SLOTS and self._num_slots_held(source, phase) >= SLOTS:
                raise PeerFault("window_exceeded", f"more than {SLOTS} slots of {source}")
            if sources is None:
                sources = self.incoming[key] = {}
            sources[source] = payload
            payload.arrived_at = now
            self._wake(key, source, payload)
            return size
        except PeerFault:
            if phase < len(self.plans) and not self._holds_slot_of(payload, source):
                payload.release()
            raise

    def _holds_slot_of(self, payload: SlotPayload, source: int) -> bool:
        """Returns whether another kept payload lies in the same slot of the source's publish buffer."""
        kept = (sources.get(source) for sources in self.incoming.values())
        return any(
            isinstance(each, SlotPayload) and (each.phase, each.slot) == (payload.phase, payload.slot)
            and each.use <= payload.use for each in kept
        )  # fmt: skip

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey) -> None:
        """See `Absences.skip`."""
        self.facts.silent.discard(source)
        self.absences.skip(source, first, last, self._floor)
        self._port.ready()

    def note_waiting_report(self, source: int, now: float) -> None:
        """Records that a source that was asked is itself waiting for others."""
        self.reported_waiting[source] = now

    def _num_slots_held(self, source: int, phase: int) -> int:
        """Returns how many slots of this source's publish buffer are kept. Payloads that arrived as chunks are not
        counted."""
        kept = (sources.get(source) for key, sources in self.incoming.items() if key[1] == phase)
        return sum(isinstance(each, SlotPayload) for each in kept)

    def _assemble(self, key: ExchangeKey, source: int, incoming: PartialPayload) -> None:
        """Assembles the chunks of a whole payload as they arrive, for the current round and the next; those of later
        rounds stay in their buffers."""
        if key[0] <= self._floor + 1:
            freed = incoming.assemble()
            if freed:
                self._port.consumed(source, freed)

    def _wake_mailbox_reader(self, is_complete: bool) -> None:
        """Wakes a thread that waits for mailbox payloads, after an arrival. is_complete: whether the arrival completes
        a payload."""
        if is_complete and self.mailbox.waits:
            self._port.ready()

    def _wake(self, key: ExchangeKey, source: int, incoming: PartialPayload) -> None:
        """Calls `InboxPort.ready` if, with this arrival, no more than `_spare` of the wanted sources are missing."""
        wanted = self._wanted
        if source in wanted:
            wanted_key, chunk = self._wanted_chunk
            if key == wanted_key and (incoming.has(0, chunk) if chunk >= 0 else incoming.complete):
                wanted.discard(source)
                if len(wanted) <= self._spare:
                    self._port.ready()

    # -- consumption -------------------------------------------------------------------------------------------

    def advance(self, round: int) -> None:
        """Ends the rounds below `round`: what still arrives of them is stale."""
        if round != self._current_round:
            self._current_round = round
            self.facts.next_round()
            if self.reported_waiting:
                self.reported_waiting.clear()
        if round <= self._floor:
            return
        self._floor = round
        if self._finished:
            self._finished = {key for key in self._finished if key[0] >= round}
        if self.absences.served_together:
            self.absences.forget_below(round)
        if not self.incoming:
            return
        for key in [key for key in self.incoming if key[0] < round]:
            self._drop(key)
        for key, sources in self.incoming.items():
            if not self.schemas[key[1]].elementwise:
                for source, incoming in sources.items():
                    self._assemble(key, source, incoming)

    def end(self, round: int) -> None:
        """Announces that this node takes part in no round from `round` on. Drops what others sent for these rounds, to
        make room for their means, which share the window with payloads."""
        self._end_round = round
        for key in [key for key in self.incoming if key[0] >= round]:
            self._drop(key)

    def reset(self, round: int) -> None:
        """Begins a new generation with `round`, and releases what arrived in the previous one."""
        for sources in self.incoming.values():
            for incoming in sources.values():
                incoming.release()
        self.incoming.clear()
        self.mailbox.clear()
        self._finished.clear()
        self.absences.clear()
        self._wanted = set()
        self._last_late.clear()
        self.facts.silent.clear()
        self._floor, self._end_round, self._current_round = round, math.inf, -1

    def finish(self, key: ExchangeKey) -> None:
        """Ends this exchange: what still arrives of it is stale."""
        self._finished.add(key)
        if self.absences.served_together:
            self.absences.served_together.pop(key, None)
        self._drop(key)

    def _drop(self, key: ExchangeKey) -> None:
        for source, incoming in self.incoming.pop(key, {}).items():
            waiting = incoming.unconsumed_bytes()
            incoming.release()
            if waiting:
                self._port.consumed(source, waiting)

    def set_wanted(self, sources: Collection[int], key: ExchangeKey, chunk: int, spare: int = 0) -> None:
        """Sets the sources that are waited for: `InboxPort.ready` is called once all of them have delivered `chunk`,
        and before that for each arrival once no more than `spare` are missing."""
        self._wanted, self._wanted_chunk, self._spare = set(sources), (key, chunk), spare

    def ask(self, key: ExchangeKey, waiting: Collection[int]) -> None:
        """Asks the sources whose payloads are overdue whether they are waiting themselves, except those whose answer
        would say nothing."""
        if asked := self.absences.independent_sources(key, waiting):
            self._port.ask(asked)

    def count_wait(self, sources: Collection[int], seconds: float) -> None:
        """Counts the seconds that a round waited for these sources."""
        for source in sources:
            if source != SUM and seconds > 0:
                self.counters.edge(source).wait_seconds += seconds

    def outstanding(self, key: ExchangeKey, chunk: int, sources: list[int]) -> list[int]:
        """Returns those of `sources` that have not delivered `chunk`, which may be WHOLE."""
        arrived = self.incoming.get(key)
        if arrived is None:
            return sources
        found: list[int] = []
        for source in sources:
            incoming = arrived.get(source)
            if incoming is None or not (incoming.complete if chunk < 0 else incoming.has(0, chunk)):
                found.append(source)
        return found

    def copy_out(self, channel: int, taken: list[Taken]) -> list[Collected]:
        """Returns mailbox payloads on the device of the models, in memory of their own. Called without the lock,
        because it copies.

        Leaves out payloads that changed while they were copied and, if these are to be rejected, payloads that hold NaN
        or infinity.
        """
        found = []
        for source, round, incoming in taken:
            payload, wrong = copy_out(incoming, self.placement.to_device, self.placement.to_device_copy), "overwritten"
            if payload is not None and self.reject_non_finite and non_finite_sources({source: payload}):
                payload, wrong = None, "non_finite"
            if payload is None:
                self.counters.fault(wrong, source, f"round {round}, phase {channel}")
            else:
                found.append(Collected(source, round, payload))
        return found

    def release(self, chunk: int, sources: dict[int, PartialPayload]) -> None:
        """Releases the buffers of a mixed chunk."""
        for source, incoming in sources.items():
            freed = incoming.release_chunk(chunk)
            if freed:
                self._port.consumed(source, freed)
