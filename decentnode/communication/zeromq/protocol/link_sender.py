"""The sending half of reliable links: sequence numbers, flow control, queues and retransmission. No I/O."""

from __future__ import annotations

import logging
import math
from typing import Protocol

from decentnode.communication.counters import Counters
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.zeromq.protocol.credentials import BulkAccess
from decentnode.communication.zeromq.protocol.link_state import (
    BULK,
    CONTROL,
    MAX_PAYLOADS,
    Body,
    Channel,
    PeerLink,
    QueuedMessage,
)
from decentnode.metrics.figures import Purpose
from decentnode.wire import codec, framing, messages
from decentnode.wire.messages import Ack, Ask, Bye, Credit, Hello, Key, Message, Probe, Skipped
from decentnode.wire.session import Session

logger = logging.getLogger(__name__)

EDGE_KINDS = frozenset({Ack, Probe, Credit, Ask, Key, Bye})
"""Messages of the link protocol itself, which the two ends of an edge exchange."""
UNNUMBERED = frozenset(messages.UNNUMBERED)
MAX_QUEUED = 20_000
"""Most control messages that wait for one peer; a peer with more is given up."""
HELLOS_PER_CONNECTION, RENEW_SECONDS = 4, 2.0


class LinkPort(Protocol):
    """The interface through which the links act on the outside. Its methods are called within calls of
    `ReliableLinks`."""

    def send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        """Passes one message to the connection to a peer; not blocking. Returns False if the connection accepts none at
        the moment; the implementation then calls `LinkSender.writable` once it does."""

    def renew(self, uid: int, plane: int) -> None:
        """Closes the connection to a peer, dropping what is in flight on it. The next message makes a new one."""

    def carried(self, uid: int, plane: int) -> int | None:
        """Returns how many bytes sent over the connection have reached the peer's machine; None if it is not known."""

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        """Handles an admitted message that is not part of the link protocol, or a Bye. Each numbered message is
        delivered once. May raise PeerFault."""

    def consumed(self, uid: int, size: int) -> None:
        """Frees bytes of a peer's flow-control window, because the message that they carried was refused."""

    def has_room(self, uid: int) -> None:
        """Notes that the queue of a peer, which had reached `max_payloads`, accepts payloads again."""


class LinkSender:
    """Sends to all peers of one node; a part of its `ReliableLinks`. now: seconds of any monotonic clock."""

    def __init__(self, session: Session, port: LinkPort, counters: Counters, window: int, access: BulkAccess) -> None:
        """window: bytes of bulk messages that a peer accepts before it grants more."""
        self.control_kind = framing.NONE
        """The kind of checksum of control messages."""
        self.edges: dict[int, PeerLink] = {}
        self.max_payloads = MAX_PAYLOADS
        """Most payloads that may wait for one peer; set before the start."""
        self.due = math.inf
        """`ReliableLinks.next_deadline`: nothing is due before. Exact after a tick; later it is only lowered, when
        something new becomes due, and not raised when something is done, because looking at every peer for every
        message would cost too much."""
        self._session, self._port, self._counters = session, port, counters
        self._window, self._access = window, access

    def due_by(self, when: float) -> None:
        """Notes that something is due at `when`."""
        if when < self.due:
            self.due = when

    def takes(self, uid: int) -> bool:
        """Returns whether one more payload may be queued for this peer; a payload for a peer that is gone is dropped.
        Any thread may call it, because it reads a single integer."""
        edge = self.edges.get(uid)
        return edge is None or edge.queued < self.max_payloads

    def waiting(self, uid: int) -> int:
        """Returns how many payloads wait for this peer. Any thread may call it, like `takes`."""
        edge = self.edges.get(uid)
        return 0 if edge is None else edge.queued

    def control(self, uid: int, message: Message, now: float) -> None:
        """Sends a control message."""
        if isinstance(message, Hello):
            self.count_hello(uid, now)
        purpose: Purpose = "protocol" if type(message) in EDGE_KINDS else "control"
        self.control_header(uid, codec.encode(message), now, numbered=type(message) not in UNNUMBERED, purpose=purpose)

    def count_hello(self, uid: int, now: float) -> None:
        """Counts a `Hello` that was sent or received, and makes a new control connection if there are too many:
        repeated `Hello` messages mean that the answers are lost."""
        edge = self.edge(uid)
        edge.hellos += 1
        if edge.hellos >= HELLOS_PER_CONNECTION and now >= edge.renewed + RENEW_SECONDS:
            edge.hellos, edge.renewed = 0, now
            self.renew(uid, edge, CONTROL)

    def control_header(
        self, uid: int, header: bytes, now: float, *, numbered: bool = True, purpose: Purpose = "control"
    ) -> None:
        """Sends an encoded control message."""
        edge = self.edge(uid)
        plane = edge.planes[CONTROL]
        if edge.is_gone:
            return
        if numbered:
            kind, empty = self.control_kind, framing.compute_body_checksum(self.control_kind, b"")
            plane.queue.append(QueuedMessage(header, kind=kind, body_checksum=empty, purpose=purpose))
            if len(plane.queue) > MAX_QUEUED:
                logger.warning("node %d does not accept control messages: gave up on it", uid)
                edge.forget()
        else:
            plane.urgent.append((header, purpose))
        self.pump(uid, edge, CONTROL, now)

    def bulk(self, uid: int, message: QueuedMessage, now: float) -> None:
        """Sends a bulk message now, or as soon as the peer's window and the connection allow."""
        edge = self.edge(uid)
        if edge.is_gone:
            return
        edge.planes[BULK].queue.append(message)
        edge.queued += message.last
        if edge.needs_credential and not edge.asked_for_credential:
            edge.asked_for_credential = True
            self.control(uid, self.message(Ask), now)
        self.pump(uid, edge, BULK, now)

    def bulk_moved_at(self, uid: int) -> float:
        """Returns `PeerLink.bulk_moved_at` of the link to a peer. Any thread may call it, like `takes`."""
        edge = self.edges.get(uid)
        return -math.inf if edge is None else edge.bulk_moved_at

    def withhold(self, uid: int, key: ExchangeKey, now: float) -> None:
        """Notes that the payload of this (round, phase) is not sent. The peer is told so as soon as it accepts
        messages, so that it does not wait for the payload."""
        edge = self.edge(uid)
        if not edge.is_gone:
            edge.withheld = (key if edge.withheld is None else edge.withheld[0], key)
            if edge.queued < self.max_payloads:
                self._has_room(uid, edge, now)

    def unacked_peers(self) -> list[int]:
        """Returns the peers that have not acknowledged all bulk messages sent to them."""
        bulk = ((uid, edge.planes[BULK]) for uid, edge in self.edges.items())
        return [uid for uid, plane in bulk if plane.out.kept or plane.queue]

    def slowness(self, now: float) -> list[float]:
        """Returns how many seconds each peer that was sent bulk messages takes to acknowledge them
        (`SendStream.slowness`)."""
        return [edge.planes[BULK].out.slowness(now) for edge in self.edges.values() if edge.sent and not edge.is_gone]

    def send_once(self, uid: int, message: Message) -> None:
        """Sends a message without a sequence number, to any peer, even one that was given up; its sender repeats it
        until it is answered."""
        checksum = framing.compute_body_checksum(self.control_kind, b"")
        first = framing.sealed(0, codec.encode(message), self.control_kind, checksum)
        if self._port.send(uid, CONTROL, first, None):
            self._counters.edge(uid).control_bytes_sent += len(first)

    def renew_control(self) -> None:
        """Makes new control connections to all peers. Membership messages are not numbered, so that no missing
        acknowledgement shows that such a connection is dead in this direction."""
        for uid in range(self._session.num_nodes):
            edge = self.edges.get(uid)
            if edge is not None:
                self.renew(uid, edge, CONTROL)
            elif uid != self._session.uid:
                self._port.renew(uid, CONTROL)

    def grant(self, uid: int, allowed: int, now: float) -> None:
        """Allows a peer to send `allowed` bytes in total (`ReceiveCredits.consumed`)."""
        self.control(uid, self.message(Credit, allowed), now)

    def log_in(self, uid: int) -> bytes:
        """Returns a credential for one connection to the peer's bulk plane; empty if no credential is needed."""
        credential = self.edge(uid).credential
        return b"" if credential is None else credential.log_in()

    def request_acks(self, now: float) -> None:
        """Probes every peer now for an acknowledgement of the bulk messages sent so far."""
        for uid, edge in self.edges.items():
            if edge.planes[BULK].out.kept:
                edge.planes[BULK].out.ask()
                self.probe(uid, edge, BULK, now)

    def writable(self, uid: int, plane: int, now: float) -> None:
        """Sends what waits for a connection that had refused a message and accepts messages again."""
        edge = self.edge(uid)
        edge.planes[plane].full_since = math.inf
        self.pump(uid, edge, plane, now)

    def edge(self, uid: int) -> PeerLink:
        found = self.edges.get(uid)
        if found is None:
            found = self.edges[uid] = PeerLink(self._window, self._access.needs_credential)
        return found

    def message(self, kind: type[Message], *values: object) -> Message:
        session = self._session
        return kind(session.run, session.generation, session.uid, *values, origin=session.origin)

    def pump(self, uid: int, edge: PeerLink, number: int, now: float) -> None:
        """Sends what may be sent, most urgent first, until the connection is full."""
        plane = edge.planes[number]
        if number == BULK and edge.needs_credential and edge.credential is None:
            return
        if (plane.urgent or plane.again) and not self._pump_urgent(uid, number, plane):
            self._note_full(plane, now)
            return
        out, queue = plane.out, plane.queue
        while queue and not out.full:
            message = queue[0]
            if number == BULK and edge.sent + message.cost > edge.allowed:
                return
            sealed = plane.sealed
            if sealed is None:
                lease = message.lease if edge.outwards is None else None  # an encrypted body is a copy
                sealed = plane.sealed = (*message.frames(out.following, edge.outwards), lease)
            if not self._port.send(uid, number, sealed[0], sealed[1]):
                self._note_full(plane, now)
                return
            first = not out.kept
            out.keep(sealed, now)
            if first:
                plane.full_since = math.inf
                self.due_by(out.next_deadline)
            plane.sealed = None
            queue.popleft()
            edge.sent += message.cost
            message.count(self._counters.edge(uid), sealed[0], sealed[1])
            if message.last:
                edge.queued -= 1
                if edge.queued == self.max_payloads - 1:
                    self._has_room(uid, edge, now)

    def _has_room(self, uid: int, edge: PeerLink, now: float) -> None:
        """Tells a peer whose queue has room again which payloads were withheld, and reports the room to the port."""
        if edge.withheld is not None:
            (round, phase), last = edge.withheld
            edge.withheld = None
            self.control(uid, self.message(Skipped, round, phase, *last), now)
        self._port.has_room(uid)

    def _note_full(self, plane: Channel, now: float) -> None:
        """Notes that the connection is full. If no message is unacknowledged, only a time-out shows that it is dead."""
        if plane.full_since == math.inf and plane.queue and not plane.out.kept:
            plane.full_since = now
            self.due_by(now + plane.patience)

    def _pump_urgent(self, uid: int, number: int, plane: Channel) -> bool:
        """Sends messages without numbers and lost messages again; returns False if the connection is full."""
        counted = self._counters.edge(uid)
        while plane.urgent:
            header, purpose = plane.urgent[0]
            first = framing.sealed(0, header, self.control_kind, framing.compute_body_checksum(self.control_kind, b""))
            if not self._port.send(uid, number, first, None):
                return False
            plane.urgent.popleft()
            if purpose == "control":
                counted.control_bytes_sent += len(first)
            else:
                counted.framing_bytes_sent += len(first)
        while plane.again:
            sequence = next(iter(plane.again))
            if sequence in plane.out.kept:
                first, body, _ = plane.out.kept[sequence][0]
                if not self._port.send(uid, number, first, body):
                    return False
                plane.out.sent_again(sequence)
                size = len(first) + (0 if body is None else len(body))
                counted.resends += 1
                counted.resent_bytes += size
                counted.framing_bytes_sent += size
            del plane.again[sequence]
        return True

    def stuck(self, uid: int, number: int, plane: Channel, now: float) -> bool:
        """Returns whether a connection is given up, because the peer has acknowledged nothing for too long and the
        connection is not merely slow."""
        out = plane.out
        if not out.silent(now):
            return False
        carried = self._port.carried(uid, number)
        if carried is not None:
            owed = sum(len(first) + (0 if body is None else len(body)) for (first, body, _), _ in out.kept.values())
            if out.carries(carried, owed, now):
                return False
        return out.stuck(now)

    def probe(self, uid: int, edge: PeerLink, number: int, now: float) -> None:
        plane = edge.planes[number]
        if plane.out.probe_due(now) and not edge.is_gone:
            plane.urgent.append((codec.encode(self.message(Probe, number, plane.out.probe(now))), "protocol"))
            self.pump(uid, edge, number, now)

    def renew(self, uid: int, edge: PeerLink, number: int) -> None:
        """Makes a new connection, over which a probe then asks which messages were lost with the old one."""
        self._counters.on_event("connection_renewed", uid, f"plane {number}")
        self._port.renew(uid, number)
        plane = edge.planes[number]
        plane.full_since = math.inf
        plane.out.ask()
        if plane.out.closing:  # do not wait for the answer to the probe: the peer's connection may be dead as well
            plane.again.update(dict.fromkeys(plane.out.kept))
        self.due = -math.inf
