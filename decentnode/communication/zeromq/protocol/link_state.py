"""The state of the link between a node and one peer: queues, both directions of both planes, windows. No sockets."""

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
"""Most payloads that wait for one peer, that is, are not completely passed to the socket. Further payloads are not sent
to it and count as undelivered. If a round has more than two exchanges (phases, fragments, buffers), the limit is the
number of exchanges in two rounds instead."""
REFUSED_SECONDS = 5.0
"""How long a connection with no unacknowledged messages may be full before a new one is made: as long as one without
acknowledgements (`stream.STUCK_SECONDS`)."""
MAX_URGENT = 64
"""Most messages without a number that wait for one peer's socket."""
ONE_FRAME_BYTES = 16 * 1024
"""Bodies up to this size, as sent, are in the same frame as their header.

This saves one call at each end. It also avoids an abort: libzmq 4.3.5 aborts the process (session_base.cpp,
clean_pipes) if a DEALER is closed without linger at the moment when its peer cuts the connection, and the first part of
a message has been taken out of the queue and the second has not. libzmq takes parts from the queue while it fills a
batch of 8192 bytes, which after the end of a short body may also take the first part of the next message. A body of two
batches or more is sent in one piece after its first batch, so that the next first part begins a batch of its own, whose
rest is filled with its body. What remains exposed is a first part with which a batch ends, as it may after short
messages.
"""


class HeldBody(Protocol):
    """The body of a bulk message, which is kept without a copy until its receivers have it: a `zmq.Frame`."""

    @property
    def buffer(self) -> memoryview:
        """The bytes of the body."""

    def __len__(self) -> int: ...


Body = bytes | HeldBody
Hold = Callable[[memoryview, bool], Body]
"""hold(body, shared) returns a long body in a form that can be kept. shared: its memory does not change, so that it
need not be copied."""


def copied(body: memoryview, shared: bool) -> Body:  # noqa: ARG001
    """Returns a copy of the body; a `Hold`."""
    return bytes(body)


@dataclass(eq=False, slots=True)
class QueuedMessage:
    """One message to one or several peers, which share its body."""

    header: bytes
    body: Body | None = None
    cost: int = 0
    """Bytes that it takes of the receiver's window."""
    kind: int = framing.NONE
    body_checksum: int = 0
    lease: object = None
    """An object that is kept alive as long as the body's memory must not change."""
    purpose: Purpose = "control"
    """The purpose for which its bytes are counted when it is first sent: the bytes of the body, or of the whole message
    if it has no body."""
    last: bool = False
    """Whether it is the last message of a payload."""

    @classmethod
    def bulk(
        cls, header: bytes, body: memoryview, kind: int, lease: object = None, *, hold: Hold = copied,
        purpose: Purpose = "data", last: bool = False,
    ) -> QueuedMessage:
        """Creates a message with a copy of `body` or, if it is long, with what `hold` returns for it.

        lease: while it is held, the memory of `body` does not change; None: `body` has to be copied.
        """
        size = body.nbytes
        if size <= ONE_FRAME_BYTES:
            short = bytes(body)
            checksum = framing.compute_body_checksum(kind, short)
            return cls(header, short, size + MESSAGE_COST, kind, checksum, None, purpose, last)
        held = hold(body, lease is not None)
        body_checksum = framing.compute_body_checksum(kind, held if isinstance(held, bytes) else held.buffer)
        return cls(header, held, size + MESSAGE_COST, kind, body_checksum, lease, purpose, last)

    def count(self, edge: EdgeCounters, first: bytes, body: Body | None) -> None:
        """Counts the bytes of this message, in the form that `frames` returned, when it is sent for the first time."""
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
        """Returns the message as it is sent: its first frame, and its second frame or None. cipher: encrypts the
        body."""
        header, body, kind, body_checksum = self.header, self.body, self.kind, self.body_checksum
        if body is None:
            return framing.sealed(sequence, header, kind, body_checksum), None
        if cipher is not None:
            plain = body if isinstance(body, bytes) else body.buffer
            body, kind, body_checksum = cipher.encrypt(sequence, header, plain), framing.AES_GCM, 0
        if isinstance(body, bytes) and len(body) <= ONE_FRAME_BYTES and len(header) <= framing.MAX_JOINED_HEADER:
            return framing.sealed(sequence, header, kind, body_checksum, body), None
        return framing.sealed(sequence, header, kind, body_checksum), body


SealedMessage = tuple[bytes, Body | None, object]
"""A message as it is sent to one peer: first frame, second frame or None, and the lease on the memory of these
bytes."""


@dataclass
class Channel:
    """Both directions of one plane between a node and one peer: messages to send, and messages that have arrived."""

    out: SendStream[SealedMessage] = field(default_factory=SendStream)
    """Messages are kept exactly as they were sent, so that a message that is sent again has the same bytes."""
    sealed: SealedMessage | None = None
    """The first message of `queue`, already sealed with the next sequence number, if the socket had no room for it.
    Each sequence number is thus sealed only once: it is the nonce of AES-GCM, and a key must never encrypt two
    plaintexts with the same nonce."""
    urgent: deque[tuple[bytes, Purpose]] = field(default_factory=lambda: deque(maxlen=MAX_URGENT))
    """(header, purpose) of messages without a number. The oldest are dropped if there are too many, because they are
    repeated or out of date."""
    again: dict[int, None] = field(default_factory=dict)
    """Sequence numbers of kept messages that have to be sent again, in this order, each once."""
    queue: deque[QueuedMessage] = field(default_factory=deque)
    received: ReceiveStream = field(default_factory=lambda: ReceiveStream(ordered=False))
    probes: int = 0
    """Number of probes of the peer since any other message of this plane arrived."""
    probed_at: int = -1
    """How many messages had arrived when the first of these probes did."""
    probed_since: float = 0.0
    """When the first of these probes arrived."""
    full_since: float = math.inf
    """Since when the connection has had no room for the first message of `queue`, if no message is unacknowledged;
    otherwise missing acknowledgements show whether the connection is dead."""
    patience: float = REFUSED_SECONDS
    """How long the connection may have no room."""

    @property
    def next_deadline(self) -> float:
        return min(self.out.next_deadline, self.full_since + self.patience)

    def close(self, now: float) -> None:
        """Begins to close: only a short time is left for queued and unacknowledged messages (`SendStream.close`)."""
        self.out.close(now)
        self.patience = CLOSING_STUCK_SECONDS


class ReceiveCredits:
    """The flow-control credits of all peers: the window of each advances by the bytes that this node has consumed. Not
    thread-safe."""

    def __init__(self, window: int) -> None:
        """window: most bytes, including headers, that one peer may have sent and this node has not consumed yet."""
        self.window = window
        self.used: dict[int, int] = {}
        """uid -> bytes that were consumed so far."""
        self._granted: dict[int, int] = {}

    def consumed(self, uid: int, size: int) -> int | None:
        """Notes that bytes of `uid` were consumed. Returns the total bytes that it may send from now on, once a quarter
        of its window is free that it does not know of; None before."""
        used = self.used[uid] = self.used.get(uid, 0) + size
        if used - self._granted.get(uid, 0) < self.window // 4:
            return None
        self._granted[uid] = used
        return used + self.window

    def clear(self) -> None:
        """Resets the credits: no peer has sent anything yet."""
        self.used.clear()
        self._granted.clear()


class PeerLink:
    """The state of the link to one peer."""

    def __init__(self, window: int, needs_credential: bool) -> None:
        self.planes = (Channel(received=ReceiveStream(ordered=True)), Channel())
        self.sent = 0
        """Total cost of the bulk messages sent so far."""
        self.allowed = window
        """The value up to which the peer allows `sent` to grow."""
        self.queued = 0
        """Number of payloads of which a message waits in the bulk plane's queue."""
        self.withheld: tuple[ExchangeKey, ExchangeKey] | None = None
        """The first and the last (round, phase) of payloads that were not sent, until the peer is told so."""
        self.received = 0
        """Total cost of the bulk messages that arrived."""
        self.bulk_moved_at = -math.inf
        """When a bulk message of the peer last arrived, or the peer last acknowledged one of this node."""
        self.needs_credential = needs_credential
        """Whether bulk messages to the peer wait for a credential of it."""
        self.asked_for_credential = False
        """Whether the peer was asked for a credential."""
        self.credential: BulkCredential | None = None
        self.outwards: Cipher | None = None
        self.inwards: Cipher | None = None
        """The ciphers of bulk messages to (`outwards`) and from (`inwards`) the peer; None without encryption."""
        self.hellos = 0
        """Number of `Hello` messages sent to it or received from it since the last new connection."""
        self.renewed = 0.0
        """When repeated `Hello` messages last led to a new connection."""
        self.last_damage_report = 0.0
        """When a damaged message of the peer last led to an acknowledgement."""
        self.is_gone = False
        """Whether nothing is sent to this peer any more."""
        self.has_left = False
        """Whether the peer said goodbye."""

    def forget(self) -> None:
        """Drops all messages for this peer, to which nothing is sent any more."""
        self.is_gone = True
        self.queued, self.withheld = 0, None
        for plane in self.planes:
            plane.sealed = None
            plane.queue.clear()
            plane.urgent.clear()
            plane.again.clear()
            plane.full_since = math.inf
            plane.out.forget()
