"""Numbered messages between two nodes: nothing is lost and nothing comes twice, wherever a connection is cut.

Between two nodes there are two planes, control and bulk. Every message on a plane has a sequence number, and the sender
keeps it until it is acknowledged. A probe, sent after all other messages on the same plane, makes the receiver report
which of those sent before it are missing; exactly these are sent again. No sockets, no clock.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from decentnode.errors import PeerFault

T = TypeVar("T")

MAX_AHEAD = 1 << 15
"""How far a number may be above the first missing one. Bounds the bitmap and the receiver's memory."""
PROBE_SECONDS = (0.5, 5.0)
"""Shortest and longest time without an acknowledgement after which a sender probes. The shortest is twice what a
receiver may take to acknowledge, and not a few round trips: before, silence says nothing, so that every healthy
edge would be asked in every round. What TCP carries is lost with a connection alone, and where it is made anew the
sender asks at once; what is damaged, or followed by anything else, is reported at once."""
STUCK_SECONDS = 5.0
"""Least time without an acknowledgement after which a connection counts as stuck; doubled every time in a row."""
LOOK_SECONDS = 1.0
"""Over so much time a connection that seems stuck is watched, where somebody knows how many bytes it has carried."""
LEAST_BYTES_PER_SECOND = 64
"""What carries less is stuck: beside what was sent, a connection carries nothing but a question now and then."""
MARGIN_BYTES = 1 << 20
"""Bytes beyond those of the messages that wait for an acknowledgement, after which these must have arrived."""
CLOSING_STUCK_SECONDS = 1.0
"""The same at the end, when there is little time left for another connection."""


class SendStream(Generic[T]):
    """The sending end: messages of type T, kept until acknowledged."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[T, int]] = {}
        """sequence -> (message, number of transmissions on this stream when it was last sent); ascending."""
        self._next = 1
        self._transmissions = 0
        self._quiet_since = 0.0
        self._patience = PROBE_SECONDS[0]
        self._asked = False
        self.closing = False
        """Whether little time is left for what is kept."""
        self._progress = 0.0
        self._limit = self._least = STUCK_SECONDS
        self._carried: tuple[int, int, float] | None = None
        """Of a connection that is watched, as it seems stuck: how many bytes it had carried at first, how many when it
        was looked at last, and when that was."""
        self._sent_at: dict[int, float] = {}
        self._delay = 0.0
        """Longest time that acknowledgements took lately, in seconds; decays by a tenth with each acknowledgement."""

    @property
    def full(self) -> bool:
        """Whether no message may be sent before an acknowledgement comes."""
        return bool(self.kept) and self._next - next(iter(self.kept)) >= MAX_AHEAD

    @property
    def following(self) -> int:
        """The sequence number of the next message."""
        return self._next

    def keep(self, message: T, now: float) -> int:
        """Keep a message that is sent now. Returns its sequence number. now: seconds of any monotonic clock."""
        if not self.kept:
            self._quiet_since, self._patience, self._progress = now, PROBE_SECONDS[0], now
        sequence = self._next
        self._next += 1
        self._transmissions += 1
        self.kept[sequence] = (message, self._transmissions)
        self._sent_at[sequence] = now
        return sequence

    def silent(self, now: float) -> bool:
        """Returns whether nothing was acknowledged for so long that the connection may be stuck."""
        return bool(self.kept) and now >= self._stuck_at

    def carries(self, carried: int, owed: int, now: float) -> bool:
        """Of a connection that is silent: returns whether it is slow rather than stuck, which is known once it was
        watched for a while. After True, it is not silent for a while.

        carried: bytes that the other end's machine has of all that went over it. owed: bytes of the messages that are
        kept. Where it carried all of these, and no acknowledgement came of any, it is of no use, however fast.
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
        """Returns whether nothing was acknowledged for so long that a new connection should be made. After True, the
        time without an acknowledgement counts anew, and twice as much is allowed."""
        if not self.silent(now):
            return False
        self._carried = None
        self._limit, self._progress = 2 * self._limit, now
        self._quiet_since, self._patience = now, PROBE_SECONDS[0]  # a new connection: it is asked soon what is missing
        return True

    @property
    def _stuck_at(self) -> float:
        return self._progress + (self._limit if self.closing else max(self._limit, 4 * self._delay))

    @property
    def next_deadline(self) -> float:
        """When a probe is due or the connection counts as stuck, whichever is first; infinite with nothing kept."""
        if not self.kept:
            return math.inf
        probe = self._quiet_since if self._asked else self._quiet_since + self._patience
        return min(probe, self._stuck_at)

    def slowness(self, now: float) -> float:
        """Returns how many seconds acknowledgements take: the longest of late, or that which is overdue by now."""
        return max(self._delay, now - next(iter(self._sent_at.values()), now))

    def sent_again(self, sequence: int) -> None:
        """Note that the message `sequence` is sent again now."""
        self._transmissions += 1
        self.kept[sequence] = (self.kept[sequence][0], self._transmissions)

    def probe(self, now: float) -> int:
        """Note that a probe is sent now. Returns its number: how many transmissions were made before it."""
        self._quiet_since, self._asked = now, False
        self._patience = min(2 * self._patience, PROBE_SECONDS[1])
        return self._transmissions

    def probe_due(self, now: float) -> bool:
        """Whether to send a probe now."""
        return bool(self.kept) and (self._asked or now >= self._quiet_since + self._patience)

    def forget(self) -> None:
        """Drop all messages: the receiver is gone."""
        self.kept.clear()
        self._sent_at.clear()

    def ask(self) -> None:
        """The receiver reported a gap: a probe is due at once."""
        self._asked = True

    def close(self, now: float) -> None:
        """Little time is left for what is kept: a probe is due at once, and the connection soon counts as stuck,
        however long acknowledgements took before."""
        self._asked = self.closing = True
        self._limit, self._least, self._progress = CLOSING_STUCK_SECONDS, CLOSING_STUCK_SECONDS, now

    def acknowledged(self, first_missing: int, ahead: bytes, probe: int, now: float) -> list[int]:
        """Drop what has arrived. Returns the sequence numbers of messages to send again.

        ahead: bit i is set where the message first_missing + 1 + i has arrived. probe: number of the probe that this
        answers, 0 for none. Raises PeerFault for numbers that were never used.
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
    """The receiving end. ordered: a message that comes before its predecessors is refused and sent again later;
    otherwise it is taken early."""

    def __init__(self, ordered: bool) -> None:
        self.first_missing = 1
        self.unreported = 0
        """Messages that arrived since the last report."""
        self.gap = False
        """Whether a message was missed that no report has mentioned."""
        self._ordered = ordered
        self._gap_at = 0
        """The first missing number when a gap was last reported."""
        self._ahead: set[int] = set()

    def take(self, sequence: int) -> bool:
        """Returns whether this message is new and to be used. Raises PeerFault for a number too far ahead."""
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
        """How many messages came so far, each counted once."""
        return self.first_missing - 1 + len(self._ahead)

    def report(self) -> tuple[int, bytes, bool]:
        """Returns the fields of the acknowledgement that is sent now: (first missing number, bitmap of the arrived ones
        after it, whether a gap was seen)."""
        bits = bytearray((max(self._ahead) - self.first_missing + 7) // 8 if self._ahead else 0)
        for sequence in self._ahead:
            offset = sequence - self.first_missing - 1
            bits[offset >> 3] |= 1 << (offset & 7)
        gap, self.gap, self.unreported = self.gap, False, 0
        return self.first_missing, bytes(bits), gap
