"""Reliable delivery between two nodes: every numbered message arrives once, wherever a connection is cut.

Between two nodes there are two planes, control and bulk. Every numbered message on a plane has a sequence number, and
the sender keeps it until it is acknowledged. A probe, sent after all other messages of its plane, makes the receiver
report which of the messages before it are missing; exactly these are sent again. No sockets, no clock.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from decentnode.errors import PeerFault

T = TypeVar("T")

MAX_AHEAD = 1 << 15
"""How far a sequence number may be above the first missing one. Bounds the bitmap and the receiver's memory."""
PROBE_SECONDS = (0.5, 5.0)
"""Shortest and longest time without an acknowledgement after which a sender probes.

The shortest is twice the time that a receiver may take to acknowledge. After only a few round trips silence means
nothing, and every healthy edge would be probed in every round. Nothing is lost by waiting: TCP loses bytes only
together with the connection, and on a new connection the sender probes at once; a message that is damaged, or missing
before another one, is reported at once."""
STUCK_SECONDS = 5.0
"""Shortest time without an acknowledgement after which a connection counts as stuck; doubled each time in a row."""
LOOK_SECONDS = 1.0
"""Time over which a connection that seems stuck is watched, if the number of bytes that it has carried is known."""
LEAST_BYTES_PER_SECOND = 64
"""A watched connection that carries less is stuck. Apart from messages it carries only a probe now and then."""
MARGIN_BYTES = 1 << 20
"""A connection that carried so many bytes more than the unacknowledged messages have is useless: they must have
arrived."""
CLOSING_STUCK_SECONDS = 1.0
"""As STUCK_SECONDS, while the link closes and little time is left for another connection."""


class SendStream(Generic[T]):
    """The sending end of a plane: keeps messages of type T until they are acknowledged."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[T, int]] = {}
        """sequence number -> (message, count of all transmissions on this stream when it was last sent); ascending."""
        self._next = 1
        self._transmissions = 0
        self._quiet_since = 0.0
        self._patience = PROBE_SECONDS[0]
        self._asked = False
        self.closing = False
        """Whether the link closes, so that little time is left for the kept messages."""
        self._progress = 0.0
        self._limit = self._least = STUCK_SECONDS
        self._carried: tuple[int, int, float] | None = None
        """For a connection that is watched because it seems stuck: (bytes carried at the first look, bytes carried at
        the last look, time of the last look)."""
        self._sent_at: dict[int, float] = {}
        self._delay = 0.0
        """Longest time that recent acknowledgements took, in seconds; decays by a tenth with each acknowledgement."""

    @property
    def full(self) -> bool:
        """Whether no message may be sent before the next acknowledgement."""
        return bool(self.kept) and self._next - next(iter(self.kept)) >= MAX_AHEAD

    @property
    def following(self) -> int:
        """The sequence number of the next message."""
        return self._next

    def keep(self, message: T, now: float) -> int:
        """Keeps a message that is sent now, and returns its sequence number. now: seconds of any monotonic clock."""
        if not self.kept:
            self._quiet_since, self._patience, self._progress = now, PROBE_SECONDS[0], now
        sequence = self._next
        self._next += 1
        self._transmissions += 1
        self.kept[sequence] = (message, self._transmissions)
        self._sent_at[sequence] = now
        return sequence

    def silent(self, now: float) -> bool:
        """Returns whether no acknowledgement has come for so long that the connection may be stuck."""
        return bool(self.kept) and now >= self._stuck_at

    def carries(self, carried: int, owed: int, now: float) -> bool:
        """Returns whether a silent connection still carries bytes, so that it is slow rather than stuck.

        The first call begins to watch it. After True, the connection does not count as silent for LOOK_SECONDS.

        carried: bytes sent over the connection that have reached the other end's machine. owed: bytes of the kept
        messages. A connection that carried all of these without one acknowledgement is useless, however fast it is.
        """
        if self.closing:
            return False
        known, self._carried = self._carried, (carried, carried, now)
        if known is not None:
            first, before, then = known
            idle = carried - before < LEAST_BYTES_PER_SECOND * (now - then)
            if idle or carried - first > owed + MARGIN_BYTES:
                self._carried = None
                return False
            self._carried = first, carried, now
        self._progress += now + LOOK_SECONDS - self._stuck_at
        return True

    def stuck(self, now: float) -> bool:
        """Returns whether no acknowledgement has come for so long that a new connection is needed. After True, the time
        without an acknowledgement starts again, and twice as much is allowed."""
        if not self.silent(now):
            return False
        self._carried = None
        self._limit, self._progress = 2 * self._limit, now
        self._quiet_since, self._patience = now, PROBE_SECONDS[0]  # probe the new connection soon for missing messages
        return True

    @property
    def _stuck_at(self) -> float:
        return self._progress + (self._limit if self.closing else max(self._limit, 4 * self._delay))

    @property
    def next_deadline(self) -> float:
        """When a probe is due or the connection counts as stuck, whichever is first; infinite if no message is kept."""
        if not self.kept:
            return math.inf
        probe = self._quiet_since if self._asked else self._quiet_since + self._patience
        return min(probe, self._stuck_at)

    def slowness(self, now: float) -> float:
        """Returns how many seconds acknowledgements take: the longest recent delay, or the current wait if longer."""
        return max(self._delay, now - next(iter(self._sent_at.values()), now))

    def sent_again(self, sequence: int) -> None:
        """Notes that the message `sequence` is sent again now."""
        self._transmissions += 1
        self.kept[sequence] = (self.kept[sequence][0], self._transmissions)

    def probe(self, now: float) -> int:
        """Notes that a probe is sent now, and returns its number: the count of transmissions before it."""
        self._quiet_since, self._asked = now, False
        self._patience = min(2 * self._patience, PROBE_SECONDS[1])
        return self._transmissions

    def probe_due(self, now: float) -> bool:
        """Returns whether to send a probe now."""
        return bool(self.kept) and (self._asked or now >= self._quiet_since + self._patience)

    def forget(self) -> None:
        """Drops all kept messages because the receiver is gone."""
        self.kept.clear()
        self._sent_at.clear()

    def ask(self) -> None:
        """Makes a probe due at once, because the receiver reported a gap."""
        self._asked = True

    def close(self, now: float) -> None:
        """Begins to close: a probe is due at once, and the connection soon counts as stuck, however long
        acknowledgements took before."""
        self._asked = self.closing = True
        self._limit, self._least, self._progress = CLOSING_STUCK_SECONDS, CLOSING_STUCK_SECONDS, now

    def acknowledge(self, first_missing: int, ahead: bytes, probe: int, now: float) -> list[int]:
        """Drops the messages that have arrived, and returns the sequence numbers of those to send again.

        ahead: bit i is set if the message first_missing + 1 + i has arrived. probe: number of the probe that the
        acknowledgement answers, 0 for none. Raises PeerFault for numbers that were never used.
        """
        if not 1 <= first_missing <= self._next or probe > self._transmissions:
            raise PeerFault("wrong_acknowledgement", f"{first_missing}, probe {probe}")
        before, oldest = len(self.kept), now
        for sequence in list(self.kept):
            offset = sequence - first_missing - 1
            if offset >= 8 * len(ahead):
                break
            if offset < -1 or (offset >= 0 and ahead[offset >> 3] >> (offset & 7) & 1):
                del self.kept[sequence]
                oldest = min(oldest, self._sent_at.pop(sequence))
        if len(self.kept) < before:
            self._quiet_since, self._patience, self._progress = now, PROBE_SECONDS[0], now
            self._carried = None
            self._limit, self._delay = self._least, max(now - oldest, 0.9 * self._delay)
        if not probe:
            return []
        return [sequence for sequence, (_, left) in self.kept.items() if left <= probe]


class ReceiveStream:
    """The receiving end of a plane. ordered: a message that arrives before its predecessors is dropped and sent again
    later; otherwise it is accepted early."""

    def __init__(self, ordered: bool) -> None:
        self.first_missing = 1
        self.unreported = 0
        """Number of messages that arrived since the last report."""
        self.gap = False
        """Whether a message is missing that no report has mentioned yet."""
        self._ordered = ordered
        self._gap_at = 0
        """The first missing number when a gap was last noticed; each gap is reported once."""
        self._ahead: set[int] = set()

    def take(self, sequence: int) -> bool:
        """Notes an arrived message. Returns whether the caller is to use it: it is new and, in an ordered stream, the
        next one. Raises PeerFault for a number that is too far ahead."""
        if sequence == self.first_missing:
            self.unreported += 1
            self.first_missing += 1
            while self._ahead and self.first_missing in self._ahead:
                self._ahead.remove(self.first_missing)
                self.first_missing += 1
            return True
        if sequence < self.first_missing or sequence in self._ahead:
            self.unreported += 1
            return False
        if sequence - self.first_missing > MAX_AHEAD:
            raise PeerFault("sequence_jump", f"{sequence} after {self.first_missing - 1}")
        if self._gap_at != self.first_missing:
            self.gap, self._gap_at = True, self.first_missing
        if self._ordered:
            return False
        self._ahead.add(sequence)
        self.unreported += 1
        return True

    @property
    def taken(self) -> int:
        """Number of different messages that have arrived so far."""
        return self.first_missing - 1 + len(self._ahead)

    def report(self) -> tuple[int, bytes, bool]:
        """Returns the fields of the acknowledgement that is sent now: (first missing number, bitmap of the messages
        after it that have arrived, whether a gap was noticed)."""
        bits = bytearray((max(self._ahead) - self.first_missing + 7) // 8 if self._ahead else 0)
        for sequence in self._ahead:
            offset = sequence - self.first_missing - 1
            bits[offset >> 3] |= 1 << (offset & 7)
        gap, self.gap, self.unreported = self.gap, False, 0
        return self.first_missing, bytes(bits), gap
