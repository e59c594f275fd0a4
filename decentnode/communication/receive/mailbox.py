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
MAX_INCOMPLETE = 2
"""How many incomplete payloads of one source and channel are kept beside the complete ones. Chunks arrive in order
except for those that are sent again, so there is one, and more only after a loss."""


@dataclass
class _Entry:
    """The payloads kept of one source on one channel, by round."""

    complete: dict[int, PartialPayload] = field(default_factory=dict)
    incomplete: dict[int, PartialPayload] = field(default_factory=dict)


class Mailbox:
    """The payloads that arrived on the channels that are mailboxes, by channel and source.

    Memory is bounded: per source and channel, `Schema.mailbox` complete payloads and MAX_INCOMPLETE others, each no
    larger than the schema allows. Chunks are copied out of the messages as they arrive, so that a sender's window never
    waits for a node that does not read its mailbox.
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

    def is_mailbox(self, channel: int) -> bool:
        """Returns whether a channel is a mailbox."""
        return bool(self._limits[channel])

    def rounds(self, channel: int) -> list[tuple[int, int]]:
        """Returns (source, round) of the complete payloads of a channel, ascending."""
        return sorted((source, round) for (where, source), entry in self._entries.items() if where == channel
                      for round in entry.complete)  # fmt: skip

    def take(self, channel: int, round: int | None) -> list[Taken]:
        """Removes and returns the complete payloads of a channel, ascending. round: takes only payloads of this round,
        and drops those of earlier rounds."""
        found: list[Taken] = []
        for source, each in self.rounds(channel):
            if round is None or each <= round:
                payload = self._entries[channel, source].complete.pop(each)
                if round in (None, each):
                    found.append((source, each, payload))
                else:
                    payload.release()
        return found

    # -- arrivals
    def put(self, message: Chunk, buffer: memoryview, now: float) -> bool:
        """Takes a chunk that fits the schema. Returns whether it completes its payload. Raises PeerFault."""
        key, source, size = (message.round, message.phase), message.source, buffer.nbytes + MESSAGE_COST
        entry = self._entry(key, source)
        payload = entry.incomplete.get(message.round)
        if payload is None:
            payload = ChunkedPayload(self._plans[message.phase])
            if not self._admit(entry, key, source, payload):
                self._consumed(source, size)
                return False
        if not isinstance(payload, ChunkedPayload):
            raise PeerFault("duplicate_chunk", f"round {message.round} from {source}")
        payload.put(message, buffer, now)
        freed = payload.assemble()
        if freed:
            self._consumed(source, freed)
        if payload.complete:
            self._store(entry, key, source, payload)
        return payload.complete

    def begin(self, key: ExchangeKey, source: int, payload: PartialPayload) -> bool:
        """Announces a payload that will arrive in its own memory. Returns whether it is wanted; if not, releases it."""
        return self._admit(self._entry(key, source), key, source, payload)

    def chunk_received(self, key: ExchangeKey, source: int, last: bool, now: float) -> bool:
        """Announces, after `begin`, that another chunk has arrived. Returns whether the payload is complete."""
        entry = self._entry(key, source)
        payload = entry.incomplete.get(key[0])
        if not isinstance(payload, MappedPayload) or payload.chunks_received is None:
            return False
        payload.chunks_received = None if last else payload.chunks_received + 1
        payload.arrived_at = now
        if last:
            self._store(entry, key, source, payload)
        return last

    def put_slot(self, key: ExchangeKey, source: int, payload: SlotPayload, now: float) -> bool:
        """Takes a complete payload in a neighbor's slot. Returns whether it is wanted; if not, releases it."""
        entry = self._entry(key, source)
        payload.arrived_at = now
        if not self._admit(entry, key, source, payload):
            return False
        self._store(entry, key, source, payload)
        return True

    def _entry(self, key: ExchangeKey, source: int) -> _Entry:
        found = self._entries.get((key[1], source))
        return self._entries.setdefault((key[1], source), _Entry()) if found is None else found

    def _admit(self, entry: _Entry, key: ExchangeKey, source: int, payload: PartialPayload) -> bool:
        """Returns whether a payload of which the first part arrives is wanted; if not, releases it."""
        round, channel = key
        if round in entry.complete or round in entry.incomplete or self._is_outdated(entry, channel, round):
            payload.release()
            return False
        entry.incomplete[round] = payload
        if len(entry.incomplete) > MAX_INCOMPLETE:
            self._drop(entry, min(entry.incomplete), source)
        return round in entry.incomplete

    def _is_outdated(self, entry: _Entry, channel: int, round: int) -> bool:
        """Returns whether newer payloads fill the mailbox already."""
        return len(entry.complete) >= self._limits[channel] and round < min(entry.complete)

    def _store(self, entry: _Entry, key: ExchangeKey, source: int, payload: PartialPayload) -> None:
        round, channel = key
        entry.incomplete.pop(round, None)
        entry.complete[round] = payload
        if len(entry.complete) > self._limits[channel]:
            entry.complete.pop(min(entry.complete)).release()
        for old in [each for each in entry.incomplete if self._is_outdated(entry, channel, each)]:
            self._drop(entry, old, source)

    def _drop(self, entry: _Entry, round: int, source: int) -> None:
        payload = entry.incomplete.pop(round)
        waiting = payload.unconsumed_bytes()
        payload.release()
        if waiting:
            self._consumed(source, waiting)

    def clear(self) -> None:
        """Releases everything, because a new generation begins."""
        for entry in self._entries.values():
            for payload in (*entry.complete.values(), *entry.incomplete.values()):
                payload.release()
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
        present = [source for source, round in self._mailbox.rounds(self._channel) if self._round in (None, round)]
        missing = self._sources.difference(present, facts.departed)
        over = not missing and (len(present) >= self._count or (not self._count and bool(self._sources)))
        if not (over or facts.regrouping or now >= self.deadline):
            self._mailbox.waits = True
            facts.wait_for(tuple(sorted(missing)), self._began)
            return False
        self._mailbox.waits = False
        facts.waiting = None
        for source in missing:
            self._counters.edge(source).wait_seconds += max(0.0, now - self._began)
        return True


def copy_out(
    incoming: PartialPayload, to_device: Callable[[Tensor], Tensor], to_device_copy: Callable[[Tensor], Tensor]
) -> Payload | None:
    """Returns a payload copied to memory of its own, and releases the original; None if it changed while it was copied.
    Called without the lock, because it copies.

    to_device: returns a tensor on the device of the models, possibly the tensor itself. to_device_copy: does so, always
    in other memory.
    """
    try:
        if isinstance(incoming, SlotPayload):
            incoming.enter()
        place = to_device if isinstance(incoming, ChunkedPayload) else to_device_copy
        payload = incoming.payload()
        tensors = {name: place(each) for name, each in payload.tensors.items()}
        if isinstance(incoming, SlotPayload) and not incoming.reader.on_device and not incoming.is_intact():
            return None
        return Payload(tensors, payload.scalars)
    finally:
        incoming.release()
