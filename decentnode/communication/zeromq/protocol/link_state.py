"""What is under way between a node and one peer: queued messages, both directions of both planes, windows. No sockets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from decentnode.communication.counters import EdgeCounters
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.protocol.credentials import BulkCredential, Cipher
from decentnode.metrics.figures import Purpose
from decentnode.wire import framing
from decentnode.wire.stream import CLOSING_STUCK_SECONDS, ReceiveStream, SendStream

CONTROL, BULK = 0, 1
"""The two planes of an edge: control messages arrive in order, bulk messages in any order."""
MAX_PAYLOADS = 4
"""Payloads of rounds that wait for one peer, with anything of them not handed to the socket yet; further ones are not
sent to it, and count as undelivered. Where a round has more than two exchanges (phases, fragments, buffers), those of
two rounds."""
REFUSED_SECONDS = 5.0
"""How long a connection may have no room, with nothing unacknowledged, before another is made: as long as one on which
nothing is acknowledged."""
MAX_URGENT = 64
"""Messages that are not numbered and wait for one peer's socket."""
ONE_FRAME_BYTES = 16 * 1024
"""Bodies up to this size, as sent, travel in one frame with their header.

That is one call less at either end. And libzmq 4.3.5 aborts the process (session_base.cpp, clean_pipes) where a DEALER
is closed without linger in the moment its peer cuts the connection, if the first part of a message was taken out of
the queue by then and the second was not. Parts are taken while a batch of 8192 bytes is filled: with the end of a short
body, and the first part behind it. A body of two batches or more leaves in one piece after its first batch, so that the
next first part begins a batch of its own, and its body is taken for the rest of it. What remains exposed is a first
part that a batch ends in, as it may after short messages.
"""


class HeldBody(Protocol):
    """The body of a bulk message that is kept until its receivers have it, without a copy: a `zmq.Frame`."""

    @property
    def buffer(self) -> memoryview:
        """Its bytes."""

    def __len__(self) -> int: ...


Body = bytes | HeldBody
Hold = Callable[[memoryview, bool], Body]
"""hold(body, shared) keeps a long body; shared: its memory does not change, so that it needs no copy."""


def copied(body: memoryview, shared: bool) -> Body:  # noqa: ARG001
    """A `Hold` that copies."""
    return bytes(body)


@dataclass(eq=False, slots=True)
class QueuedMessage:
    """One message towards one or several peers; the body is shared."""

    header: bytes
    body: Body | None = None
    cost: int = 0
    """What it counts for in the receiver's window."""
    kind: int = framing.NONE
    of_body: int = 0
    lease: object = None
    """Kept alive as long as the body's memory may not change."""
    purpose: Purpose = "control"
    """What its first sending counts for: the whole message, or, of one with a body, that."""
    last: bool = False
    """Whether it is the last of a round's payload."""

    @classmethod
    def bulk(
        cls, header: bytes, body: memoryview, kind: int, lease: object = None, *, hold: Hold = copied,
        purpose: Purpose = "data", last: bool = False,
    ) -> QueuedMessage:
        """A message with a copy of `body`, or with what `hold` makes of it where it is long.

        lease: while it is held, the memory of `body` does not change; None: `body` has to be copied.
        """
        size = body.nbytes
        if size <= ONE_FRAME_BYTES:
            short = bytes(body)
            return cls(header, short, size + MESSAGE_COST, kind, framing.body_sum(kind, short), None, purpose, last)
        held = hold(body, lease is not None)
        of_body = framing.body_sum(kind, held if isinstance(held, bytes) else held.buffer)
        return cls(header, held, size + MESSAGE_COST, kind, of_body, lease, purpose, last)

    def count(self, edge: EdgeCounters, first: bytes, body: Body | None) -> None:
        """Count that this message, as `frames` made it, was sent for the first time."""
        size = len(first) + (0 if body is None else len(body))
        if self.body is not None:
            plain = self.cost - MESSAGE_COST
            edge.framing_bytes_sent += size - plain
            size = plain
        if self.purpose == "evaluation":
            edge.evaluation_bytes_sent += size
        elif self.purpose == "control":
            edge.control_bytes_sent += size
        elif self.body is None:
            edge.framing_bytes_sent += size

    def frames(self, sequence: int, cipher: Cipher | None) -> tuple[bytes, Body | None]:
        """The message as it travels: its first frame, and its second or None. cipher: encrypts the body."""
        header, body, kind, of_body = self.header, self.body, self.kind, self.of_body
        if body is None:
            return framing.sealed(sequence, header, kind, of_body), None
        if cipher is not None:
            plain = body if isinstance(body, bytes) else body.buffer
            body, kind, of_body = cipher.encrypted(sequence, header, plain), framing.AES_GCM, 0
        if isinstance(body, bytes) and len(body) <= ONE_FRAME_BYTES and len(header) <= framing.MAX_JOINED_HEADER:
            return framing.sealed(sequence, header, kind, of_body, body), None
        return framing.sealed(sequence, header, kind, of_body), body


Sealed = tuple[bytes, Body | None, object]
"""A message as it travels to one peer: first frame, second frame or None, and the lease on what these bytes lie in."""


@dataclass
class Channel:
    """One direction of one plane: what leaves here, and what came."""

    out: SendStream[Sealed] = field(default_factory=SendStream)
    """Kept as they left, so that what is sent again is the same to the last bit."""
    sealed: Sealed | None = None
    """The first of `queue` under the number that follows, where the socket had no room for it. So each number is sealed
    once: under AES-GCM, where it is the nonce, no key ever meets two plaintexts with one nonce."""
    urgent: deque[tuple[bytes, Purpose]] = field(default_factory=lambda: deque(maxlen=MAX_URGENT))
    """Headers of messages that are not numbered, and what they are for; the oldest are dropped, as they are said again
    or out of date."""
    again: dict[int, None] = field(default_factory=dict)
    """Numbers of messages, among those that are kept, that have to be sent again; in this order, each once."""
    queue: deque[QueuedMessage] = field(default_factory=deque)
    came: ReceiveStream = field(default_factory=lambda: ReceiveStream(ordered=False))
    probes: int = 0
    """Probes of the peer since anything else of this plane came."""
    probed_at: int = -1
    """How much had come by then."""
    probed_since: float = 0.0
    """When the first of these probes came."""
    refused: float = math.inf
    """Since when the connection has no room for the first of `queue`, where nothing that was sent is unacknowledged: no
    acknowledgement fails to come then, which would tell that the connection is dead."""
    patience: float = REFUSED_SECONDS
    """How long it may have none."""

    @property
    def next_deadline(self) -> float:
        return min(self.out.next_deadline, self.refused + self.patience)

    def close(self, now: float) -> None:
        """Little time is left for what waits here and for what is not acknowledged (`SendStream.close`)."""
        self.out.close(now)
        self.patience = CLOSING_STUCK_SECONDS


class ReceiveCredits:
    """What peers may send: the window of each moves on by the bytes of it that are used up here. Not thread-safe."""

    def __init__(self, window: int) -> None:
        """window: most bytes that one peer may have under way to this node and not used up, headers included."""
        self.window = window
        self.used: dict[int, int] = {}
        """By uid: bytes that were used up so far."""
        self._granted: dict[int, int] = {}

    def consumed(self, uid: int, size: int) -> int | None:
        """Bytes of `uid` are used up. Returns how far it may send from now on, once a quarter of its window is free
        that it does not know of; None before."""
        used = self.used[uid] = self.used.get(uid, 0) + size
        if used - self._granted.get(uid, 0) < self.window // 4:
            return None
        self._granted[uid] = used
        return used + self.window

    def clear(self) -> None:
        """Nobody has sent anything yet."""
        self.used.clear()
        self._granted.clear()


class PeerLink:
    """All about one peer."""

    def __init__(self, window: int, needs_credential: bool) -> None:
        self.planes = (Channel(came=ReceiveStream(ordered=True)), Channel())
        self.sent = 0
        """Cost of the bulk messages sent so far."""
        self.allowed = window
        """What the peer lets `sent` grow to."""
        self.queued = 0
        """Payloads of rounds of which something waits in the bulk plane's queue."""
        self.withheld: tuple[ExchangeKey, ExchangeKey] | None = None
        """The first and the last (round, phase) of payloads that were not sent, until the peer has heard so."""
        self.came = 0
        """Cost of the bulk messages that came."""
        self.needs_credential = needs_credential
        """Whether bulk to the peer waits for its credential."""
        self.asked = False
        """Whether it was asked for one."""
        self.credential: BulkCredential | None = None
        self.outwards: Cipher | None = None
        self.inwards: Cipher | None = None
        """What bulk to and from the peer is encrypted with, where it is."""
        self.hellos = 0
        """Hellos sent to it or received from it since the last new connection."""
        self.renewed = 0.0
        """When hellos last brought about a new connection."""
        self.doubted = 0.0
        """When a damaged message of the peer was last acknowledged at once."""
        self.gone = False
        """Nothing is sent to this peer any more."""
        self.left = False
        """It said goodbye."""

    def forget(self) -> None:
        """Nothing is owed to this peer any more."""
        self.gone = True
        self.queued, self.withheld = 0, None
        for plane in self.planes:
            plane.sealed = None
            plane.queue.clear()
            plane.urgent.clear()
            plane.again.clear()
            plane.refused = math.inf
            plane.out.forget()
