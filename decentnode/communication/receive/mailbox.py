"""Payloads that nobody waits for by their rounds: kept as they come until the node takes them. No I/O, no lock, no
clock.

A channel whose schema says so (`Schema.mailbox`) is a mailbox: a node publishes in it whenever it likes, to whom it
likes, and a receiver takes what has come. Of each source the newest few payloads are kept; older ones make room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decentnode.communication.counters import Counters
from decentnode.communication.parts import ExchangeKey, Schema
from decentnode.communication.receive.chunking import MESSAGE_COST, TensorPlan
from decentnode.communication.receive.partial_payload import ChunkedPayload, MappedPayload, PartialPayload, SlotPayload
from decentnode.communication.run_state import RunFacts
from decentnode.errors import PeerFault
from decentnode.payload import Payload
from decentnode.wire.messages import Chunk

Taken = tuple[int, int, PartialPayload]
"""Source, round, payload; whoever takes it lets go of it."""
PARTLY = 2
"""Payloads of one source and channel that may have come in part at a time, beside those that are whole. Chunks come in
order but for those that are sent again, so that there is one, and more only after a loss."""


@dataclass
class _Entry:
    """What is kept of one source in one channel, by round."""

    whole: dict[int, PartialPayload] = field(default_factory=dict)
    partly: dict[int, PartialPayload] = field(default_factory=dict)


class Mailbox:
    """What has come on the channels that are mailboxes, by channel and source.

    Bounds: of each source and channel `Schema.mailbox` whole payloads and PARTLY others, each no larger than the schema
    says. Bytes of chunks are copied out of the messages as they come, so that a sender's window never waits for a node
    that does not look.
    """

    def __init__(
        self, schemas: Sequence[Schema], plans: Sequence[tuple[TensorPlan, ...]], consumed: Callable[[int, int], None]
    ) -> None:
        """plans: by channel. consumed: as `InboxPort.consumed`."""
        self._limits = [schema.mailbox for schema in schemas]
        self._plans, self._consumed = plans, consumed
        self._entries: dict[tuple[int, int], _Entry] = {}
        """By channel and source."""
        self.waits = False
        """Whether somebody waits for what comes."""

    def keeps(self, channel: int) -> bool:
        """Whether a channel is a mailbox."""
        return bool(self._limits[channel])

    def rounds(self, channel: int) -> list[tuple[int, int]]:
        """Returns (source, round) of the whole payloads of a channel, ascending."""
        return sorted((source, round) for (where, source), entry in self._entries.items() if where == channel
                      for round in entry.whole)  # fmt: skip

    def take(self, channel: int, round: int | None) -> list[Taken]:
        """Returns the whole payloads of a channel, ascending. round: those of this round alone; those of rounds before
        it are dropped."""
        found: list[Taken] = []
        for source, each in self.rounds(channel):
            if round is None or each <= round:
                payload = self._entries[channel, source].whole.pop(each)
                if round in (None, each):
                    found.append((source, each, payload))
                else:
                    payload.let_go()
        return found

    # -- what comes

    def put(self, message: Chunk, buffer: memoryview, now: float) -> bool:
        """Take a chunk that fits the schema. Returns whether its payload is whole with it. Raises PeerFault."""
        key, source, size = (message.round, message.phase), message.source, buffer.nbytes + MESSAGE_COST
        entry = self._entry(key, source)
        coming = entry.partly.get(message.round)
        if coming is None:
            coming = ChunkedPayload(self._plans[message.phase])
            if not self._begins(entry, key, source, coming):
                self._consumed(source, size)
                return False
        if not isinstance(coming, ChunkedPayload):
            raise PeerFault("duplicate_chunk", f"round {message.round} from {source}")
        coming.put(message, buffer, now)
        freed = coming.assemble()
        if freed:
            self._consumed(source, freed)
        if coming.complete:
            self._keep(entry, key, source, coming)
        return coming.complete

    def begin(self, key: ExchangeKey, source: int, coming: PartialPayload) -> bool:
        """A payload begins to come into memory that it names. Returns whether it is wanted; if not it is let go of."""
        return self._begins(self._entry(key, source), key, source, coming)

    def came(self, key: ExchangeKey, source: int, last: bool, now: float) -> bool:
        """After `begin`: another chunk of it is there. Returns whether it is whole."""
        entry = self._entry(key, source)
        coming = entry.partly.get(key[0])
        if not isinstance(coming, MappedPayload) or coming.pieces is None:
            return False
        coming.pieces = None if last else coming.pieces + 1
        coming.arrived = now
        if last:
            self._keep(entry, key, source, coming)
        return last

    def put_slot(self, key: ExchangeKey, source: int, payload: SlotPayload, now: float) -> bool:
        """Take a whole payload that lies in a neighbor's slot. Returns whether it is wanted; if not it is let go
        of."""
        entry = self._entry(key, source)
        payload.arrived = now
        if not self._begins(entry, key, source, payload):
            return False
        self._keep(entry, key, source, payload)
        return True

    def _entry(self, key: ExchangeKey, source: int) -> _Entry:
        found = self._entries.get((key[1], source))
        return self._entries.setdefault((key[1], source), _Entry()) if found is None else found

    def _begins(self, entry: _Entry, key: ExchangeKey, source: int, coming: PartialPayload) -> bool:
        """Returns whether a payload is wanted that begins to come; if not it is let go of."""
        round, channel = key
        if round in entry.whole or round in entry.partly or self._is_outdated(entry, channel, round):
            coming.let_go()
            return False
        entry.partly[round] = coming
        if len(entry.partly) > PARTLY:
            self._drop(entry, min(entry.partly), source)
        return round in entry.partly

    def _is_outdated(self, entry: _Entry, channel: int, round: int) -> bool:
        """Whether newer payloads fill the mailbox already."""
        return len(entry.whole) >= self._limits[channel] and round < min(entry.whole)

    def _keep(self, entry: _Entry, key: ExchangeKey, source: int, payload: PartialPayload) -> None:
        round, channel = key
        entry.partly.pop(round, None)
        entry.whole[round] = payload
        if len(entry.whole) > self._limits[channel]:
            entry.whole.pop(min(entry.whole)).let_go()
        for old in [each for each in entry.partly if self._is_outdated(entry, channel, each)]:
            self._drop(entry, old, source)

    def _drop(self, entry: _Entry, round: int, source: int) -> None:
        payload = entry.partly.pop(round)
        waiting = payload.waiting_bytes()
        payload.let_go()
        if waiting:
            self._consumed(source, waiting)

    def clear(self) -> None:
        """A new generation begins: what came in the one before is let go of."""
        for entry in self._entries.values():
            for payload in (*entry.whole.values(), *entry.partly.values()):
                payload.let_go()
        self._entries.clear()


class MailboxWait:
    """Until a mailbox has what is asked for, or the deadline (`run_state.PostponableWait`). Never longer than until the
    generation or the run is over."""

    def __init__(
        self, mailbox: Mailbox, facts: RunFacts, counters: Counters, *, channel: int, round: int | None, count: int,
        sources: Collection[int], seconds: float, now: float,
    ) -> None:
        """count: of payloads, of any round or of `round`, that are enough. sources: of each of which there is to be
        one, unless it departed."""
        self._mailbox, self._facts, self._counters = mailbox, facts, counters
        self._channel, self._round, self._count, self._sources = channel, round, count, frozenset(sources)
        self._began, self.deadline = now, now + seconds

    def postpone(self, seconds: float) -> None:
        """As `run_state.PostponableWait.postpone`."""
        self._began += seconds
        self.deadline += seconds

    def step(self, now: float) -> bool:
        """Whether the wait is over. Raises what every wait raises once the run has failed."""
        facts = self._facts
        facts.raise_if_failed()
        here = [source for source, round in self._mailbox.rounds(self._channel) if self._round in (None, round)]
        missing = self._sources.difference(here, facts.departed)
        over = not missing and (len(here) >= self._count or (not self._count and bool(self._sources)))
        if not (over or facts.regrouping or now >= self.deadline):
            self._mailbox.waits = True
            facts.wait_for(tuple(sorted(missing)), self._began)
            return False
        self._mailbox.waits = False
        facts.waiting = None
        for source in missing:
            self._counters.edge(source).wait_seconds += max(0.0, now - self._began)
        return True


def owned(
    incoming: PartialPayload, placed: Callable[[Tensor], Tensor], copied: Callable[[Tensor], Tensor]
) -> Payload | None:
    """Returns a payload in memory of its own, and lets go of where it lay; None where it changed meanwhile. To be
    called without a lock: it copies.

    placed: a tensor on the device of the models, which may be the tensor itself; copied: in other memory, too.
    """
    try:
        if isinstance(incoming, SlotPayload):
            incoming.enter()
        own = placed if isinstance(incoming, ChunkedPayload) else copied
        payload = incoming.payload()
        tensors = {name: own(each) for name, each in payload.tensors.items()}
        if isinstance(incoming, SlotPayload) and not incoming.reader.imported and not incoming.intact():
            return None
        return Payload(tensors, payload.scalars)
    finally:
        incoming.let_go()
