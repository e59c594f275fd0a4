"""What has arrived of the payloads of rounds, who is missing and until when: the state of an inbox, without I/O.

No lock, no clock, no thread: `receive/inbox.py` lets one thread in at a time and blocks. now: seconds of any monotonic
clock.

One file: whatever comes, and whoever waits, changes the one state; payloads, their shapes, who is absent and waits have
files of their own.
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
from decentnode.communication.receive.mailbox import Mailbox, Taken, owned
from decentnode.communication.receive.partial_payload import (
    SLOTS,
    ChunkedPayload,
    MappedPayload,
    PartialPayload,
    SlotPayload,
    not_finite,
)
from decentnode.communication.receive.payload_shapes import PayloadShapes
from decentnode.communication.receive.placement import DevicePlacement
from decentnode.communication.run_state import RunFacts
from decentnode.errors import PeerFault
from decentnode.wire.bounds import Scalars
from decentnode.wire.messages import Chunk

WHOLE = -1
"""Instead of the number of a chunk: everything."""


class InboxPort(Protocol):
    """What an inbox reaches the world through. Called from within calls of `InboxState`."""

    def consumed(self, uid: int, size: int) -> None:
        """So many bytes of `uid`, headers included, are used up: it may send more."""

    def ask(self, uids: list[int]) -> None:
        """Ask these neighbors, whose payloads are overdue, whether they wait for others themselves; not blocking. Each
        answer is `InboxState.waits_itself`."""

    def ready(self) -> None:
        """Everything that the last unfinished `ArrivalWait` waits for is there, or something else that ends it."""


class InboxState:
    """Payloads by (round, phase) and source, from their first chunk until they are mixed."""

    def __init__(
        self, schemas: tuple[Schema, ...], chunk_bytes: int, facts: RunFacts, counters: Counters, port: InboxPort, *,
        reject_non_finite: bool = False, device: torch.device | None = None,
    ) -> None:
        """device: where exchanges give their payloads; the CPU when None."""
        self.placement, self.absences = DevicePlacement(device), Absences(facts)
        self.schemas = schemas
        self.reject_non_finite = reject_non_finite
        self._shapes = PayloadShapes(schemas, chunk_bytes)
        self.plans = self._shapes.plans
        self.status = facts
        self.counters = counters
        self._port = port
        self.mailbox = Mailbox(schemas, self.plans, port.consumed)
        """Of the channels that are mailboxes; the rest of this class is about the others."""
        self.incoming: dict[ExchangeKey, dict[int, PartialPayload]] = {}
        self._floor = 0
        self._end = math.inf
        """This node takes part in no round from this one on, so that nothing of theirs is kept."""
        self._round = -1
        """The one under way."""
        self.lives: dict[int, float] = {}
        """When sources last said in it that they wait for others themselves."""
        self._finished: set[ExchangeKey] = set()
        self._wanted: set[int] = set()
        """Sources that are waited for."""
        self._spare = 0
        """Once no more than so many of them are missing, whoever waits is told of each that comes."""
        self._late: dict[int, ExchangeKey] = {}
        """By source, the payload that was counted as late last."""
        self._wanted_what: tuple[ExchangeKey, int] = ((-1, 0), 0)
        """(key, chunk) of them that is waited for; chunk may be WHOLE."""

    @property
    def floor(self) -> int:
        """Payloads of rounds below it are stale; only `advance` and `reset` move it."""
        return self._floor

    def has_later(self, round: int, source: int) -> bool:
        """Returns whether anything of a later round than this one has come of a source."""
        return any(key[0] > round and source in sources for key, sources in self.incoming.items())

    # -- what comes -------------------------------------------------------------------------------------------

    def put(self, message: Chunk, buffer: memoryview, now: float) -> None:
        """Take one chunk; the buffer is kept. Raises PeerFault when it does not fit the schema or the moment."""
        self._shapes.check(message, buffer)
        key = (message.round, message.phase)
        self.status.silent.discard(message.source)
        if self.mailbox.keeps(message.phase):
            self._came(self.mailbox.put(message, buffer, now))
            return
        if message.round < self._floor or key in self._finished:
            self._count_late(key, message.source)
            raise PeerFault("stale_round", f"round {message.round} from {message.source}")
        if message.round >= self._end:
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
            self._absorb(key, message.source, incoming)
        self._wake(key, message.source, incoming)

    def _count_late(self, key: ExchangeKey, source: int) -> None:
        """Something of a payload came after its exchange was over: the payload counts once, whatever comes of it."""
        if self._late.get(source) != key:
            self._late[source] = key
            self.counters.edge(source).late_payloads += 1

    def start_receive(
        self, key: ExchangeKey, source: int, tensors: list[Tensor], scalars: Scalars, let_go: Callable[[], None]
    ) -> bool:
        """The chunks of a payload start to come into `tensors`, which are the caller's; False when nobody wants them
        any more. let_go is called once nobody reads `tensors` any more, at once with False."""
        coming = MappedPayload(self.plans[key[1]], tensors, scalars, let_go, pieces=0)
        if self.mailbox.keeps(key[1]):
            return self.mailbox.begin(key, source, coming)
        sources = self.incoming.get(key, {})
        if key[0] < self._floor or key[0] >= self._end or key in self._finished or source in sources:
            if key[0] < self._end and source not in sources:
                self._count_late(key, source)
            let_go()
            return False
        self.incoming.setdefault(key, {})[source] = coming
        return True

    def chunk_received(self, key: ExchangeKey, source: int, last: bool, now: float) -> None:
        """After `start_receive`: the next chunk after those before is there; last: the whole payload is."""
        self.status.silent.discard(source)
        if self.mailbox.keeps(key[1]):
            self._came(self.mailbox.came(key, source, last, now))
            return
        incoming = self.incoming.get(key, {}).get(source)
        if not isinstance(incoming, MappedPayload) or incoming.pieces is None:
            return
        incoming.pieces = None if last else incoming.pieces + 1
        incoming.arrived = now
        self._wake(key, source, incoming)

    def put_slot(self, source: int, round: int, totals: bytes, payload: SlotPayload, now: float) -> int:
        """Take a payload that lies in a neighbor's publish buffer; its bytes. Raises PeerFault as `put` does.

        totals: elements of each tensor, 8 bytes each. The slot is let go of at once where the payload is not kept.
        """
        phase = payload.phase
        key = round, phase
        try:
            size = self._shapes.lay_out(payload, totals)
            self.status.silent.discard(source)
            if self.mailbox.keeps(phase):
                self._came(self.mailbox.put_slot(key, source, payload, now))
                return size
            if round < self._floor or key in self._finished:
                self._count_late(key, source)
                raise PeerFault("stale_round", f"round {round} from {source}")
            if round >= self._end:
                payload.let_go()
                return size
            sources = self.incoming.get(key)
            if sources is not None and source in sources:
                raise PeerFault("duplicate_chunk", f"round {round} from {source}")
            if len(self.incoming) >= SLOTS and self._held_of(source, phase) >= SLOTS:
                raise PeerFault("window_exceeded", f"more than {SLOTS} slots of {source}")
            if sources is None:
                sources = self.incoming[key] = {}
            sources[source] = payload
            payload.arrived = now
            self._wake(key, source, payload)
            return size
        except PeerFault:
            if phase < len(self.plans) and not self._holds_slot_of(payload, source):
                payload.let_go()
            raise

    def _holds_slot_of(self, payload: SlotPayload, source: int) -> bool:
        """Whether another payload is kept that lies in the same slot of the source's publish buffer."""
        kept = (sources.get(source) for sources in self.incoming.values())
        return any(
            isinstance(each, SlotPayload) and (each.phase, each.slot) == (payload.phase, payload.slot)
            and each.use <= payload.use for each in kept
        )  # fmt: skip

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey) -> None:
        """As `Absences.skip`."""
        self.status.silent.discard(source)
        self.absences.skip(source, first, last, self._floor)
        self._port.ready()

    def waits_itself(self, source: int, now: float) -> None:
        """A source that was asked says that it waits for others itself."""
        self.lives[source] = now

    def _held_of(self, source: int, phase: int) -> int:
        """Slots of this source's publish buffer that are kept. Rounds whose payload came as chunks are none of them."""
        kept = (sources.get(source) for key, sources in self.incoming.items() if key[1] == phase)
        return sum(isinstance(each, SlotPayload) for each in kept)

    def _absorb(self, key: ExchangeKey, source: int, incoming: PartialPayload) -> None:
        """Whole payloads are put together as they come, for this round and the next; later rounds wait."""
        if key[0] <= self._floor + 1:
            freed = incoming.assemble()
            if freed:
                self._port.consumed(source, freed)

    def _came(self, whole: bool) -> None:
        """Something came into a mailbox: whoever waits for such payloads looks."""
        if whole and self.mailbox.waits:
            self._port.ready()

    def _wake(self, key: ExchangeKey, source: int, incoming: PartialPayload) -> None:
        """Something came: whoever waits goes on once everything it waits for is there."""
        wanted = self._wanted
        if source in wanted:
            what, chunk = self._wanted_what
            if key == what and (incoming.has(0, chunk) if chunk >= 0 else incoming.complete):
                wanted.discard(source)
                if len(wanted) <= self._spare:
                    self._port.ready()

    # -- what is used ------------------------------------------------------------------------------------------

    def advance(self, round: int) -> None:
        """Rounds below `round` are over: what still comes of them is stale."""
        if round != self._round:
            self._round = round
            self.status.next_round()
            if self.lives:
                self.lives.clear()
        if round <= self._floor:
            return
        self._floor = round
        if self._finished:
            self._finished = {key for key in self._finished if key[0] >= round}
        if self.absences.together:
            self.absences.forget_below(round)
        if not self.incoming:
            return
        for key in [key for key in self.incoming if key[0] < round]:
            self._drop(key)
        for key, sources in self.incoming.items():
            if not self.schemas[key[1]].elementwise:
                for source, incoming in sources.items():
                    self._absorb(key, source, incoming)

    def end(self, round: int) -> None:
        """This node takes part in no round from `round` on. What others sent for it makes room for what still has to
        come of them: means share the window with payloads."""
        self._end = round
        for key in [key for key in self.incoming if key[0] >= round]:
            self._drop(key)

    def reset(self, round: int) -> None:
        """A new generation begins with `round`: what came in the one before is let go of."""
        for sources in self.incoming.values():
            for incoming in sources.values():
                incoming.let_go()
        self.incoming.clear()
        self.mailbox.clear()
        self._finished.clear()
        self.absences.clear()
        self._wanted = set()
        self._late.clear()
        self.status.silent.clear()
        self._floor, self._end, self._round = round, math.inf, -1

    def finish(self, key: ExchangeKey) -> None:
        """Nothing of this exchange is wanted any more: what still comes of it is stale."""
        self._finished.add(key)
        if self.absences.together:
            self.absences.together.pop(key, None)
        self._drop(key)

    def _drop(self, key: ExchangeKey) -> None:
        for source, incoming in self.incoming.pop(key, {}).items():
            waiting = incoming.waiting_bytes()
            incoming.let_go()
            if waiting:
                self._port.consumed(source, waiting)

    def want(self, sources: Collection[int], key: ExchangeKey, chunk: int, spare: int = 0) -> None:
        """`InboxPort.ready` is called once these have delivered `chunk`, and before that for each that comes once no
        more than `spare` are missing."""
        self._wanted, self._wanted_what, self._spare = set(sources), (key, chunk), spare

    def ask(self, key: ExchangeKey, waiting: Collection[int]) -> None:
        """Ask those whose payloads are overdue, as far as that can say anything."""
        if asked := self.absences.apart(key, waiting):
            self._port.ask(asked)

    def count_wait(self, sources: Collection[int], seconds: float) -> None:
        """So long a round waited for these."""
        for source in sources:
            if source != SUM and seconds > 0:
                self.counters.edge(source).wait_seconds += seconds

    def outstanding(self, key: ExchangeKey, chunk: int, sources: list[int]) -> list[int]:
        """Those of `sources` that have not delivered `chunk`, which may be WHOLE."""
        arrived = self.incoming.get(key)
        if arrived is None:
            return sources
        found: list[int] = []
        for source in sources:
            incoming = arrived.get(source)
            if incoming is None or not (incoming.complete if chunk < 0 else incoming.has(0, chunk)):
                found.append(source)
        return found

    def owned(self, channel: int, taken: list[Taken]) -> list[Collected]:
        """Payloads out of a mailbox on the device of the models, in memory of their own; to be called without a lock.
        Those that changed while they were copied are left out, and those that hold NaN or infinity, where these are to
        be rejected."""
        found = []
        for source, round, incoming in taken:
            payload, wrong = owned(incoming, self.placement.placed, self.placement.copied), "overwritten"
            if payload is not None and self.reject_non_finite and not_finite({source: payload}):
                payload, wrong = None, "non_finite"
            if payload is None:
                self.counters.fault(wrong, source, f"round {round}, phase {channel}")
            else:
                found.append(Collected(source, round, payload))
        return found

    def release(self, chunk: int, sources: dict[int, PartialPayload]) -> None:
        """Give back the buffers of a mixed chunk."""
        for source, incoming in sources.items():
            freed = incoming.take(chunk)
            if freed:
                self._port.consumed(source, freed)
