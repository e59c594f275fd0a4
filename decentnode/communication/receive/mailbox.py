"""Mailboxes: keep asynchronous payloads as they arrive until the node takes them. No I/O, no lock, no clock.

A channel whose schema says so (`Schema.mailbox`) is a mailbox. A node publishes on it at any time and to any node, and
a receiver takes what has arrived. The newest few payloads of each source are kept; older ones are dropped.
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
"""(source, round, payload). The caller has to release the payload."""
PARTLY = 2
"""How many incomplete payloads of one source and channel are kept beside the complete ones. Chunks arrive in order
except for those that are sent again, so there is one, and more only after a loss."""


@dataclass
class _Entry:
    """The payloads kept of one source on one channel, by round."""

    whole: dict[int, PartialPayload] = field(default_factory=dict)
    partly: dict[int, PartialPayload] = field(default_factory=dict)


class Mailbox:
    """The payloads that arrived on the channels that are mailboxes, by channel and source.

    Memory is bounded: per source and channel, `Schema.mailbox` complete payloads and PARTLY others, each no larger than
    the schema allows. Chunks are copied out of the messages as they arrive, so that a sender's window never waits for a
    node that does not read its mailbox.
    """

    def __init__(
        self, schemas: Sequence[Schema], plans: Sequence[tuple[TensorPlan, ...]], consumed: Callable[[int, int], None]
    ) -> None:
        """plans: by channel. consumed: see `InboxPort.consumed`."""
        self._limits = [schema.mailbox for schema in schemas]
        self._plans, self._consumed = plans, consumed
        self._entries: dict[tuple[int, int], _Entry] = {}
        """By (channel, source)."""
        self.waits = False
        """Whether a thread waits for arrivals."""

    def keeps(self, channel: int) -> bool:
        """Returns whether a channel is a mailbox."""
        return bool(self._limits[channel])

    def rounds(self, channel: int) -> list[tuple[int, int]]:
        """Returns (source, round) of the complete payloads of a channel, ascending."""
        return sorted((source, round) for (where, source), entry in self._entries.items() if where == channel
                      for round in entry.whole)  # fmt: skip

    def take(self, channel: int, round: int | None) -> list[Taken]:
        """Removes and returns the complete payloads of a channel, ascending. round: takes only payloads of this round,
        and drops those of earlier rounds."""
        found: list[Taken] = []
        for source, each in self.rounds(channel):
            if round is None or each <= round:
                payload = self._entries[channel, source].whole.pop(each)
                if round in (None, each):
                    found.append((source, each, payload))
                else:
                    payload.let_go()
        return found

    # -- arrivals
    def put(self, message: Chunk, buffer: memoryview, now: float) -> bool:
        """Takes a chunk that fits the schema. Returns whether it completes its payload. Raises PeerFault."""
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
        """Announces a payload that will arrive in its own memory. Returns whether it is wanted; if not, releases it."""
        return self._begins(self._entry(key, source), key, source, coming)

    def came(self, key: ExchangeKey, source: int, last: bool, now: float) -> bool:
        """Announces, after `begin`, that another chunk has arrived. Returns whether the payload is complete."""
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
        """Takes a complete payload in a neighbor's slot. Returns whether it is wanted; if not, releases it."""
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
        """Returns whether a payload of which the first part arrives is wanted; if not, releases it."""
        round, channel = key
        if round in entry.whole or round in entry.partly or self._is_outdated(entry, channel, round):
            coming.let_go()
            return False
        entry.partly[round] = coming
        if len(entry.partly) > PARTLY:
            self._drop(entry, min(entry.partly), source)
        return round in entry.partly

    def _is_outdated(self, entry: _Entry, channel: int, round: int) -> bool:
        """Returns whether newer payloads fill the mailbox already."""
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
        """Releases everything, because a new generation begins."""
        for entry in self._entries.values():
            for payload in (*entry.whole.values(), *entry.partly.values()):
                payload.let_go()
        self._entries.clear()


class MailboxWait:
    """The wait until a mailbox has what was asked for, or until the deadline (`run_state.PostponableWait`). Ends at the
    latest with the generation or the run."""

    def __init__(
        self, mailbox: Mailbox, facts: RunFacts, counters: Counters, *, channel: int, round: int | None, count: int,
        sources: Collection[int], seconds: float, now: float,
    ) -> None:
        """count: how many payloads are enough, of any round or of `round`. sources: one payload of each is required,
        unless it departed."""
        self._mailbox, self._facts, self._counters = mailbox, facts, counters
        self._channel, self._round, self._count, self._sources = channel, round, count, frozenset(sources)
        self._began, self.deadline = now, now + seconds

    def postpone(self, seconds: float) -> None:
        """See `run_state.PostponableWait.postpone`."""
        self._began += seconds
        self.deadline += seconds

    def step(self, now: float) -> bool:
        """Returns whether the wait is over. Raises the run's failure if the run has failed."""
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
    """Returns a payload copied to memory of its own, and releases the original; None if it changed while it was copied.
    Called without the lock, because it copies.

    placed: returns a tensor on the device of the models, possibly the tensor itself. copied: as `placed`, but always in
    other memory.
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
