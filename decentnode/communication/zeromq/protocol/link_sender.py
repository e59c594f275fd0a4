"""The sending half of a node's edges: numbers, windows, what waits for a connection, and what is sent again. No I/O."""

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
"""What an edge's two ends say to each other about the edge."""
UNNUMBERED = frozenset(messages.UNNUMBERED)
MAX_QUEUED = 20_000
"""Control messages that wait for one peer; beyond it the peer is given up."""
HELLOS_PER_CONNECTION, RENEW_SECONDS = 4, 2.0


class LinkPort(Protocol):
    """What the links reach the world through. Its methods are called from within calls of `ReliableLinks`."""

    def send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        """Hand over one message towards a peer; not blocking. False where the connection takes none now: the links'
        `writable` has to be called once it does."""

    def renew(self, uid: int, plane: int) -> None:
        """Give the connection to a peer up, with what is under way on it; the next message makes a new one."""

    def carried(self, uid: int, plane: int) -> int | None:
        """Returns how many bytes a peer's machine has of what went over the connection to it; None where nobody knows.
        """

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        """An admitted message that is not about the edge itself, or a Bye; a numbered one comes once. May raise
        PeerFault."""

    def consumed(self, uid: int, size: int) -> None:
        """Bytes of a peer's window are free again, as what they were is refused."""

    def has_room(self, uid: int) -> None:
        """A peer for which `max_payloads` waited takes payloads again."""


class LinkSender:
    """Sends to all peers of one node, for whoever holds its `ReliableLinks`. now: seconds of any monotonic clock."""

    def __init__(self, session: Session, port: LinkPort, counters: Counters, window: int, access: BulkAccess) -> None:
        """window: how much bulk a peer takes before it grants more."""
        self.control_kind = framing.NONE
        """How control messages are protected against corruption."""
        self.edges: dict[int, PeerLink] = {}
        self.max_payloads = MAX_PAYLOADS
        """How many payloads may wait for one peer; set before the start."""
        self.due = math.inf
        """`ReliableLinks.next_deadline`: nothing has to be done before. It is exact after a tick; what comes up later
        lowers it, and what is settled leaves it, as to look at every peer for every message would cost too much."""
        self._session, self._port, self._counters = session, port, counters
        self._window, self._access = window, access

    def due_by(self, when: float) -> None:
        """Something has to be done at `when` at the latest."""
        if when < self.due:
            self.due = when

    def takes(self, uid: int) -> bool:
        """Whether one more payload may wait for this peer. What is sent to one that is gone is dropped. Any thread may
        ask, as this reads one number."""
        edge = self.edges.get(uid)
        return edge is None or edge.queued < self.max_payloads

    def waiting(self, uid: int) -> int:
        """How many payloads wait for this peer. Any thread, as `takes`."""
        edge = self.edges.get(uid)
        return 0 if edge is None else edge.queued

    def control(self, uid: int, message: Message, now: float) -> None:
        """Send a control message."""
        if isinstance(message, Hello):
            self.count_hello(uid, now)
        purpose: Purpose = "protocol" if type(message) in EDGE_KINDS else "control"
        self.control_header(uid, codec.encode(message), now, numbered=type(message) not in UNNUMBERED, purpose=purpose)

    def count_hello(self, uid: int, now: float) -> None:
        """Hellos, sent or received, that go on and on mean that the answers get lost."""
        edge = self.edge(uid)
        edge.hellos += 1
        if edge.hellos >= HELLOS_PER_CONNECTION and now >= edge.renewed + RENEW_SECONDS:
            edge.hellos, edge.renewed = 0, now
            self.renew(uid, edge, CONTROL)

    def control_header(
        self, uid: int, header: bytes, now: float, *, numbered: bool = True, purpose: Purpose = "control"
    ) -> None:
        """Send an encoded control message."""
        edge = self.edge(uid)
        plane = edge.planes[CONTROL]
        if edge.gone:
            return
        if numbered:
            kind = self.control_kind
            plane.queue.append(QueuedMessage(header, kind=kind, of_body=framing.body_sum(kind, b""), purpose=purpose))
            if len(plane.queue) > MAX_QUEUED:
                logger.warning("node %d does not accept control messages: gave up on it", uid)
                edge.forget()
        else:
            plane.urgent.append((header, purpose))
        self.pump(uid, edge, CONTROL, now)

    def bulk(self, uid: int, message: QueuedMessage, now: float) -> None:
        """Send now, or as soon as the peer's window and the connection allow."""
        edge = self.edge(uid)
        if edge.gone:
            return
        edge.planes[BULK].queue.append(message)
        edge.queued += message.last
        if edge.needs_credential and not edge.asked:
            edge.asked = True
            self.control(uid, self.message(Ask), now)
        self.pump(uid, edge, BULK, now)

    def withhold(self, uid: int, key: ExchangeKey, now: float) -> None:
        """The payload of this (round, phase) is not sent. The peer hears so as soon as it takes anything, so that it
        does not wait for what will not come."""
        edge = self.edge(uid)
        if not edge.gone:
            edge.withheld = (key if edge.withheld is None else edge.withheld[0], key)
            if edge.queued < self.max_payloads:
                self._has_room(uid, edge, now)

    def owing(self) -> list[int]:
        """Peers that have not acknowledged all of the bulk that was sent to them."""
        bulk = ((uid, edge.planes[BULK]) for uid, edge in self.edges.items())
        return [uid for uid, plane in bulk if plane.out.kept or plane.queue]

    def slowness(self, now: float) -> list[float]:
        """Returns how many seconds each peer takes to acknowledge bulk (`SendStream.slowness`); of those that were sent
        any."""
        return [edge.planes[BULK].out.slowness(now) for edge in self.edges.values() if edge.sent and not edge.gone]

    def send_once(self, uid: int, message: Message) -> None:
        """Send a message that its sender repeats until it is answered: to anybody, also to peers that were given up."""
        first = framing.sealed(0, codec.encode(message), self.control_kind, framing.body_sum(self.control_kind, b""))
        if self._port.send(uid, CONTROL, first, None):
            self._counters.edge(uid).control_bytes_sent += len(first)

    def renew_control(self) -> None:
        """Make new control connections to all peers. Of what goes over them in a conversation about membership nothing
        is numbered, so that nothing else tells that one is dead in this direction."""
        for uid in range(self._session.num_nodes):
            edge = self.edges.get(uid)
            if edge is not None:
                self.renew(uid, edge, CONTROL)
            elif uid != self._session.uid:
                self._port.renew(uid, CONTROL)

    def grant(self, uid: int, allowed: int, now: float) -> None:
        """Let a peer send up to so many bytes in all (`ReceiveCredits.consumed`)."""
        self.control(uid, self.message(Credit, allowed), now)

    def log_in(self, uid: int) -> bytes:
        """A credential for one connection to the peer's bulk plane; empty where that needs none."""
        credential = self.edge(uid).credential
        return b"" if credential is None else credential.log_in()

    def hurry(self, now: float) -> None:
        """Ask every peer now what it has of the bulk sent so far."""
        for uid, edge in self.edges.items():
            if edge.planes[BULK].out.kept:
                edge.planes[BULK].out.ask()
                self.probe(uid, edge, BULK, now)

    def writable(self, uid: int, plane: int, now: float) -> None:
        """A connection that refused a message takes messages again."""
        edge = self.edge(uid)
        edge.planes[plane].refused = math.inf
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
        """Send what may leave, most urgent first, until the connection is full."""
        plane = edge.planes[number]
        if number == BULK and edge.needs_credential and edge.credential is None:
            return
        if (plane.urgent or plane.again) and not self._pump_urgent(uid, number, plane):
            self._refused(plane, now)
            return
        out, queue = plane.out, plane.queue
        while queue and not out.full:
            message = queue[0]
            if number == BULK and edge.sent + message.cost > edge.allowed:
                return
            sealed = plane.sealed
            if sealed is None:
                lease = message.lease if edge.outwards is None else None  # what is encrypted is a copy
                sealed = plane.sealed = (*message.frames(out.following, edge.outwards), lease)
            if not self._port.send(uid, number, sealed[0], sealed[1]):
                self._refused(plane, now)
                return
            first = not out.kept
            out.keep(sealed, now)
            if first:
                plane.refused = math.inf
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
        """A peer that had too many payloads waiting takes some again: tell it which ones it need not wait for."""
        if edge.withheld is not None:
            (round, phase), last = edge.withheld
            edge.withheld = None
            self.control(uid, self.message(Skipped, round, phase, *last), now)
        self._port.has_room(uid)

    def _refused(self, plane: Channel, now: float) -> None:
        """The connection is full. With nothing unacknowledged, only time tells whether it is dead."""
        if plane.refused == math.inf and plane.queue and not plane.out.kept:
            plane.refused = now
            self.due_by(now + plane.patience)

    def _pump_urgent(self, uid: int, number: int, plane: Channel) -> bool:
        """Send what is not numbered, and what was lost; False when the connection is full."""
        counted = self._counters.edge(uid)
        while plane.urgent:
            header, purpose = plane.urgent[0]
            first = framing.sealed(0, header, self.control_kind, framing.body_sum(self.control_kind, b""))
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
        """Whether a connection has acknowledged nothing for so long that it is given up, and is not merely slow."""
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
        if plane.out.probe_due(now) and not edge.gone:
            plane.urgent.append((codec.encode(self.message(Probe, number, plane.out.probe(now))), "protocol"))
            self.pump(uid, edge, number, now)

    def renew(self, uid: int, edge: PeerLink, number: int) -> None:
        """Make a new connection, and ask behind it what was lost with the old one."""
        self._counters.on_event("connection_renewed", uid, f"plane {number}")
        self._port.renew(uid, number)
        plane = edge.planes[number]
        plane.refused = math.inf
        plane.out.ask()
        if plane.out.closing:  # without the answer, which may be lost as well: the peer's connection may be dead, too
            plane.again.update(dict.fromkeys(plane.out.kept))
        self.due = -math.inf
