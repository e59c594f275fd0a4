"""Reliable links over unreliable connections: exactly-once delivery, flow control, credentials for bulk messages.

Control messages arrive in order; bulk messages in any order. `ReliableLinks` is a state machine without I/O: calls pass
it received messages, messages to send, and the time, and it acts through a `LinkPort`. It has no lock and reads no
clock: its driver (link_driver.py, on sockets) lets one thread call it at a time, and calls `tick` at `next_deadline`
at the latest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from decentnode.communication.counters import Counters
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.protocol.credentials import BulkAccess, BulkCredential, Cipher
from decentnode.communication.zeromq.protocol.link_sender import (
    EDGE_KINDS,
    RENEW_SECONDS,
    UNNUMBERED,
    LinkPort,
    LinkSender,
)
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL, PeerLink, ReceiveCredits
from decentnode.errors import PeerFault
from decentnode.wire import codec, framing, messages
from decentnode.wire.messages import Ack, Ask, Bye, Credit, Hello, Key, Message, Probe
from decentnode.wire.session import Session

logger = logging.getLogger(__name__)

BULK_KINDS = frozenset(messages.BULK)
DOUBT_SECONDS = 0.005
"""Shortest time between two acknowledgements that are sent at once for damaged messages of one peer."""
PROBES_PER_CONNECTION = 3
"""Number of probes of a peer, with no other message of it between them, after which this node's connection to it is
renewed."""
ACK_EVERY = (256, 16)
"""For each plane: number of unacknowledged messages after which an acknowledgement is sent at once; otherwise it is
sent by the next tick."""
ACK_SECONDS = 0.25
"""Longest time until an arrived message is acknowledged."""


class ReliableLinks:
    """One node's links to all of its peers. now: seconds of any monotonic clock."""

    def __init__(
        self, session: Session, port: LinkPort, counters: Counters, credits: ReceiveCredits, access: BulkAccess
    ) -> None:
        """credits: how much peers may send; its owner passes increases on with `LinkSender.grant`. access: the
        credentials of bulk messages, configured alike on all nodes."""
        self.sender = LinkSender(session, port, counters, credits.window, access)
        """The sending half."""
        self.access = access
        self._session, self._port, self._counters, self._credits = session, port, counters, credits
        self._edges, self._edge, self._message = self.sender.edges, self.sender.edge, self.sender.message
        self._closing = False
        self._broken: set[tuple[int, int]] = set()
        """(uid, plane) of connections that the next tick makes again."""
        self._report_at = math.inf
        """When the oldest unacknowledged arrived message has to be acknowledged."""

    @property
    def window(self) -> int:
        """Most bytes that one peer may have in flight to this node."""
        return self._credits.window

    def restart(self, fresh: Collection[int]) -> None:
        """Resets the links for a new generation: pending messages are dropped and sequence numbers start again.

        The caller resets the credits. fresh: nodes with new processes; their control connections are renewed as well,
        because what was queued for the old process is not for the new one. If this node is fresh itself, it makes all
        control connections again: a member that did not know its key yet has refused the connection, and ZeroMQ does
        not retry after that.
        """
        if self._session.uid in fresh:
            self.sender.renew_control()
        for uid, edge in self._edges.items():
            edge.forget()
            self._port.renew(uid, BULK)
            if uid in fresh:
                self._port.renew(uid, CONTROL)
        self._edges.clear()
        self.access.given.clear()
        self._broken.clear()
        self._report_at = math.inf

    def forget(self, uid: int) -> None:
        """Drops all messages for `uid`, which failed."""
        self._edge(uid).forget()

    # -- receiving --------------------------------------------------------------------------------------------

    def receive(self, plane: int, frames: Sequence[memoryview], uid: int | None, now: float) -> None:
        """Handles one received message; a message that breaks the protocol is counted and dropped.

        uid: the sender, if the connection proves it. The memory of a frame is kept as long as the body is in use.
        """
        source: int | None = uid
        header = b""
        try:
            if len(frames) > 1 + (plane == BULK):
                raise PeerFault("malformed_multipart", f"{len(frames)} frames")
            sequence, kind, checksum, header, body = framing.opened(frames[0])
            joined = body is not None
            if len(frames) == 2:
                if joined:
                    raise PeerFault("malformed_multipart", "a body in either frame")
                body = frames[1]
            framing.verify(sequence, kind, checksum, header, b"" if body is None else body, joined)
            message = codec.decode(header)
            if uid is not None and message.source != uid:
                raise PeerFault("wrong_identity", f"node {uid} speaks as {message.source}")
            source = message.source
            kind_of = type(message)
            if kind_of in BULK_KINDS:
                if body is None or plane != BULK:
                    raise PeerFault("wrong_plane", kind_of.__name__)
            elif body is not None or (plane == BULK and kind_of is not Probe):
                raise PeerFault("wrong_plane", kind_of.__name__)
            if (kind_of in UNNUMBERED) != (sequence == 0):
                raise PeerFault("malformed_header", f"{kind_of.__name__} with number {sequence}")
            if sequence:
                self._session.belongs(message)
                if body is not None and self.access.encrypts:
                    body = self._decrypt(sequence, kind, source, header, body)
            self._admit(plane, sequence, message, body, now)
        except PeerFault as fault:
            self.refuse(fault, source)
            if fault.reason == "checksum_mismatch":
                self._report_damage(plane, header, now)

    def _report_damage(self, plane: int, header: bytes, now: float) -> None:
        """Sends an acknowledgement to the sender of a damaged message at once, if its header can be decoded, so that it
        is sent again without waiting for a probe, which may take long on a link that breaks often."""
        try:
            message = codec.decode(header)
            self._session.belongs(message)
            edge = self._edge(message.source)
        except PeerFault as fault:
            if fault.reason == "protocol_version":  # another version may use other checksums
                self.refuse(fault)
            return
        received = edge.planes[plane].received
        received.gap = True
        if now - edge.last_damage_report >= DOUBT_SECONDS or received.unreported + 1 >= ACK_EVERY[plane]:
            edge.last_damage_report = now
            self._acknowledge(message.source, edge, plane, now)
        else:
            received.unreported += 1
            self._report_by(now + ACK_SECONDS)

    def _report_by(self, when: float) -> None:
        """Schedules the acknowledgement of arrived messages for `when` at the latest."""
        self._report_at = min(self._report_at, when)
        self.sender.due_by(when)

    def _admit(self, plane: int, sequence: int, message: Message, body: memoryview | None, now: float) -> None:
        """Handles a well-formed message, unless its sequence number shows that it is a duplicate or, on the ordered
        plane, out of order."""
        kind_of = type(message)
        if sequence:
            edge = self._edge(message.source)
            received = edge.planes[plane].received
            new = received.take(sequence)
            if received.gap or self._closing or received.unreported >= ACK_EVERY[plane] or kind_of is Ask:
                self._acknowledge(message.source, edge, plane, now)
            elif self._report_at == math.inf:
                self._report_by(now + ACK_SECONDS)
            if not new:
                return
            if body is not None:
                self._admit_bulk(edge, message, body, now)
                return
        if kind_of in EDGE_KINDS:
            self._session.admit(message)
            self._handle_link_message(plane, message, now)
        else:
            self._port.deliver(message, None, now)
            if kind_of is Hello:
                self.sender.count_hello(message.source, now)

    def _admit_bulk(self, edge: PeerLink, message: Message, body: memoryview, now: float) -> None:
        cost = body.nbytes + MESSAGE_COST
        edge.received += cost
        edge.bulk_moved_at = now
        try:
            if edge.received - self._credits.used.get(message.source, 0) > self._credits.window:
                raise PeerFault("window_exceeded", f"from {message.source}")
            self._session.admit(message)
            self._port.deliver(message, body, now)
        except PeerFault:
            self._port.consumed(message.source, cost)
            raise

    def _handle_link_message(self, plane: int, message: Message, now: float) -> None:
        """Handles a message of the link protocol itself."""
        uid = message.source
        edge = self._edge(uid)
        if isinstance(message, Ack):
            flow = edge.planes[message.plane]
            before = len(flow.out.kept)
            lost = flow.out.acknowledge(message.first_missing, message.ahead, message.probe, now)
            if message.plane == BULK and len(flow.out.kept) < before:
                edge.bulk_moved_at = now
            flow.again.update(dict.fromkeys(lost))
            if message.gap:
                flow.out.ask()
                self.sender.probe(uid, edge, message.plane, now)
            if flow.out.kept:  # the time-out of the remaining messages starts again
                self.sender.due_by(flow.out.next_deadline)
            self.sender.pump(uid, edge, message.plane, now)
        elif isinstance(message, Probe):
            if message.plane != plane:
                raise PeerFault("wrong_plane", f"probe of plane {message.plane}")
            self._count_probe(uid, edge, plane, now)
            self._acknowledge(uid, edge, plane, now, message.probe)
        elif isinstance(message, Credit):
            if message.allowed > edge.allowed:
                edge.allowed = message.allowed
                self.sender.pump(uid, edge, BULK, now)
        elif isinstance(message, Ask):
            given = self.access.give(uid)
            self.sender.control(uid, self._message(Key, given.token, given.key), now)
        elif isinstance(message, Key):
            if not edge.asked_for_credential:
                raise PeerFault("unexpected_message", "Key without having asked")
            if edge.credential is None:
                edge.credential = BulkCredential(message.token, message.key)
                edge.outwards = Cipher(edge.credential) if self.access.encrypts else None
            self.sender.pump(uid, edge, BULK, now)
        elif isinstance(message, Bye):
            edge.has_left = True
            edge.forget()
            self._port.deliver(message, None, now)

    def _count_probe(self, uid: int, edge: PeerLink, number: int, now: float) -> None:
        """Counts a probe, and renews this node's control connection to the peer if the peer keeps probing for messages
        that have long arrived.

        The peer then does not receive the acknowledgements: this node's connection to it is dead, and nothing else
        shows that while no numbered messages are sent over it.
        """
        plane = edge.planes[number]
        if plane.probed_at != plane.received.taken:
            plane.probed_at, plane.probes, plane.probed_since = plane.received.taken, 0, now
        plane.probes += 1
        if plane.probes >= PROBES_PER_CONNECTION and now >= plane.probed_since + RENEW_SECONDS:
            plane.probes, plane.probed_since = 0, now
            self.sender.renew(uid, edge, CONTROL)

    def _decrypt(self, sequence: int, kind: int, source: int, header: bytes, body: memoryview) -> memoryview:
        if kind != framing.AES_GCM or source not in self.access.given:
            raise PeerFault("not_encrypted", f"from {source}")
        edge = self._edge(source)
        if edge.inwards is None:
            edge.inwards = Cipher(self.access.given[source])
        return edge.inwards.decrypt(sequence, header, body)

    def _acknowledge(self, uid: int, edge: PeerLink, number: int, now: float, probe: int = 0) -> None:
        first_missing, ahead, gap = edge.planes[number].received.report()
        header = codec.encode(self._message(Ack, number, first_missing, ahead, int(gap), probe))
        self.sender.control_header(uid, header, now, numbered=False, purpose="protocol")

    def refuse(self, fault: PeerFault, source: int | None = None) -> None:
        """Counts a message that breaks the protocol, and logs the first ones of each kind."""
        known = self._counters.faults.get(fault.reason, 0)
        self._counters.fault(fault.reason, source, str(fault))
        if known < 3:
            logger.warning("refused a message: %s", fault)

    # -- time -------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """The latest time at which `tick` has to be called; infinite if nothing is due. It may be earlier than needed
        (`LinkSender.due`)."""
        return self.sender.due

    def _exact_deadline(self) -> float:
        due = (plane.next_deadline for edge in self._edges.values() for plane in edge.planes)
        return min(self._report_at, min(due, default=math.inf))

    def tick(self, now: float) -> None:
        """Sends due acknowledgements and probes and renews dead connections. To be called at `next_deadline` at the
        latest."""
        for uid, number in self._broken:
            self.sender.pump(uid, self._edge(uid), number, now)
        self._broken.clear()
        self._report_at = math.inf
        for uid, edge in self._edges.items():
            for number, plane in enumerate(edge.planes):
                if plane.received.unreported:
                    self._acknowledge(uid, edge, number, now)
                if self.sender.stuck(uid, number, plane, now):
                    self.sender.renew(uid, edge, number)
                elif now >= plane.full_since + plane.patience:
                    self.sender.renew(uid, edge, number)
                    self.sender.pump(uid, edge, number, now)
                self.sender.probe(uid, edge, number, now)
        self.sender.due = self._exact_deadline()

    def disconnected(self, uid: int, plane: int) -> None:
        """Handles a broken connection that ZeroMQ does not make again, because it needs a new login. The next tick
        makes it, and probes for lost messages."""
        self._port.renew(uid, plane)
        edge = self._edges.get(uid)
        if edge is not None and not edge.is_gone:
            edge.planes[plane].out.ask()
            self._broken.add((uid, plane))
            self.sender.due = -math.inf

    @property
    def breaks_matter(self) -> bool:
        """Whether broken connections should be reported: not while the run ends, here or for any peer."""
        return not self._closing and not any(edge.is_gone for edge in self._edges.values())

    def finished(self, now: float) -> bool:
        """Returns whether every peer has acknowledged everything; the first call begins to close the links.

        A dead control connection is then soon made again, because the last messages of a node, its closing figures, are
        sent over it. The time-outs of bulk messages stay as they are, because they may take long on a slow connection.
        """
        if not self._closing:
            self._closing = True
            for uid, edge in self._edges.items():
                for number, plane in enumerate(edge.planes):
                    if plane.received.unreported:
                        self._acknowledge(uid, edge, number, now)
                    if number == CONTROL:
                        plane.close(now)
                    else:
                        plane.out.ask()
                    self.sender.probe(uid, edge, number, now)
                    self.sender.due_by(plane.next_deadline)
        return not any(plane.out.kept or plane.queue for edge in self._edges.values() for plane in edge.planes)

    def goodbye(self, now: float) -> None:
        """Sends `Bye` to every peer that has not left; nothing is sent or read after it."""
        for uid, edge in self._edges.items():
            if not edge.has_left:
                edge.forget()
                edge.planes[CONTROL].urgent.append((codec.encode(self._message(Bye)), "protocol"))
                self.sender.pump(uid, edge, CONTROL, now)
