"""Edges over unreliable connections: every message once and whole wherever they break, windows, credentials for bulk.

Control messages arrive in order; bulk messages in any order. A state machine without I/O: calls bring it what came,
what is to be sent, and the time, and it acts through a `LinkPort`. It holds no lock and reads no clock: whoever drives
it (link_driver.py, on sockets) lets one thread in at a time, and calls `tick` by `next_deadline`.
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
"""Least time between two acknowledgements that damaged messages of one peer bring about."""
PROBES_PER_CONNECTION = 3
"""Probes of a peer, with nothing of it arriving between them, after which this node's connection to it is renewed."""
ACK_EVERY = (256, 16)
"""Messages of a plane after which the sender gets an acknowledgement at once; otherwise it comes with the next tick."""
ACK_SECONDS = 0.25
"""Longest time until a message that arrived is acknowledged."""


class ReliableLinks:
    """One node's edges to all peers it ever speaks with. now: seconds of any monotonic clock."""

    def __init__(
        self, session: Session, port: LinkPort, counters: Counters, credits: ReceiveCredits, access: BulkAccess
    ) -> None:
        """credits: how much peers may send; when it grows, `LinkSender.grant` passes it on.
        access: of bulk, alike on all nodes."""
        self.sender = LinkSender(session, port, counters, credits.window, access)
        """What sends."""
        self.access = access
        self._session, self._port, self._counters, self._credits = session, port, counters, credits
        self._edges, self._edge, self._message = self.sender.edges, self.sender.edge, self.sender.message
        self._closing = False
        self._broken: set[tuple[int, int]] = set()
        """(uid, plane) of connections to make again at the next tick."""
        self._report_at = math.inf
        """When the oldest message that is not acknowledged has to be."""

    @property
    def window(self) -> int:
        """Most bytes that one peer may have under way to this node."""
        return self._credits.window

    def restart(self, fresh: Collection[int]) -> None:
        """A new generation. Nothing of the old one is owed to anybody, and numbers start anew; the caller clears the
        credits. fresh: nodes whose processes are new, and what was queued for the old ones is not for them. Of a new
        one itself all connections are made anew: a member that did not know its key yet has refused it, after which
        ZeroMQ does not try again."""
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
        """`uid` failed: nothing is owed to it any more."""
        self._edge(uid).forget()

    # -- receiving --------------------------------------------------------------------------------------------

    def receive(self, plane: int, frames: Sequence[memoryview], uid: int | None, now: float) -> None:
        """One message as it came; what is wrong with it is counted. uid: who sent it, where the connection proves it.

        A frame's memory is kept as long as the body is.
        """
        source: int | None = uid
        header = b""
        try:
            if len(frames) > 1 + (plane == BULK):
                raise PeerFault("malformed_multipart", f"{len(frames)} frames")
            sequence, kind, sum_, header, body = framing.opened(frames[0])
            joined = body is not None
            if len(frames) == 2:
                if joined:
                    raise PeerFault("malformed_multipart", "a body in either frame")
                body = frames[1]
            framing.verify(sequence, kind, sum_, header, b"" if body is None else body, joined)
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
                    body = self._decrypted(sequence, kind, source, header, body)
            self._admit(plane, sequence, message, body, now)
        except PeerFault as fault:
            self.refuse(fault, source)
            if fault.reason == "checksum_mismatch":
                self._doubt(plane, header, now)

    def _doubt(self, plane: int, header: bytes, now: float) -> None:
        """A message was damaged: acknowledge at once to whoever sent it, as far as the header is right, so that it
        comes again without the longer silence of a link that breaks often."""
        try:
            message = codec.decode(header)
            self._session.belongs(message)
            edge = self._edge(message.source)
        except PeerFault as fault:
            if fault.reason == "protocol_version":  # another version's sums may be others
                self.refuse(fault)
            return
        came = edge.planes[plane].came
        came.gap = True
        if now - edge.doubted >= DOUBT_SECONDS or came.unreported + 1 >= ACK_EVERY[plane]:
            edge.doubted = now
            self._acknowledge(message.source, edge, plane, now)
        else:
            came.unreported += 1
            self._report_by(now + ACK_SECONDS)

    def _report_by(self, when: float) -> None:
        """Something that came has to be acknowledged at `when` at the latest."""
        self._report_at = min(self._report_at, when)
        self.sender.due_by(when)

    def _admit(self, plane: int, sequence: int, message: Message, body: memoryview | None, now: float) -> None:
        """Take a message that is well-formed; its number decides whether it is new."""
        kind_of = type(message)
        if sequence:
            edge = self._edge(message.source)
            came = edge.planes[plane].came
            new = came.take(sequence)
            if came.gap or self._closing or came.unreported >= ACK_EVERY[plane] or kind_of is Ask:
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
            self._serve(plane, message, now)
        else:
            self._port.deliver(message, None, now)
            if kind_of is Hello:
                self.sender.count_hello(message.source, now)

    def _admit_bulk(self, edge: PeerLink, message: Message, body: memoryview, now: float) -> None:
        cost = body.nbytes + MESSAGE_COST
        edge.came += cost
        try:
            if edge.came - self._credits.used.get(message.source, 0) > self._credits.window:
                raise PeerFault("window_exceeded", f"from {message.source}")
            self._session.admit(message)
            self._port.deliver(message, body, now)
        except PeerFault:
            self._port.consumed(message.source, cost)
            raise

    def _serve(self, plane: int, message: Message, now: float) -> None:
        """A message about the edge."""
        uid = message.source
        edge = self._edge(uid)
        if isinstance(message, Ack):
            flow = edge.planes[message.plane]
            lost = flow.out.acknowledged(message.first_missing, message.ahead, message.probe, now)
            flow.again.update(dict.fromkeys(lost))
            if message.gap:
                flow.out.ask()
                self.sender.probe(uid, edge, message.plane, now)
            if flow.out.kept:  # the patience with the rest begins anew
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
            if not edge.asked:
                raise PeerFault("unexpected_message", "Key without having asked")
            if edge.credential is None:
                edge.credential = BulkCredential(message.token, message.key)
                edge.outwards = Cipher(edge.credential) if self.access.encrypts else None
            self.sender.pump(uid, edge, BULK, now)
        elif isinstance(message, Bye):
            edge.left = True
            edge.forget()
            self._port.deliver(message, None, now)

    def _count_probe(self, uid: int, edge: PeerLink, number: int, now: float) -> None:
        """A peer that goes on probing for what has come long ago does not get the acknowledgements: this node's own
        connection to it is dead, which nothing else tells while nothing numbered is to be sent over it."""
        plane = edge.planes[number]
        if plane.probed_at != plane.came.taken:
            plane.probed_at, plane.probes, plane.probed_since = plane.came.taken, 0, now
        plane.probes += 1
        if plane.probes >= PROBES_PER_CONNECTION and now >= plane.probed_since + RENEW_SECONDS:
            plane.probes, plane.probed_since = 0, now
            self.sender.renew(uid, edge, CONTROL)

    def _decrypted(self, sequence: int, kind: int, source: int, header: bytes, body: memoryview) -> memoryview:
        if kind != framing.AES_GCM or source not in self.access.given:
            raise PeerFault("not_encrypted", f"from {source}")
        edge = self._edge(source)
        if edge.inwards is None:
            edge.inwards = Cipher(self.access.given[source])
        return edge.inwards.decrypted(sequence, header, body)

    def _acknowledge(self, uid: int, edge: PeerLink, number: int, now: float, probe: int = 0) -> None:
        first_missing, ahead, gap = edge.planes[number].came.report()
        header = codec.encode(self._message(Ack, number, first_missing, ahead, int(gap), probe))
        self.sender.control_header(uid, header, now, numbered=False, purpose="protocol")

    def refuse(self, fault: PeerFault, source: int | None = None) -> None:
        """Count a message that breaks the protocol."""
        known = self._counters.faults.get(fault.reason, 0)
        self._counters.fault(fault.reason, source, str(fault))
        if known < 3:
            logger.warning("refused a message: %s", fault)

    # -- time -------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When `tick` has to be called at the latest; infinite while nothing waits for the clock. At times there is
        nothing to do by then (`LinkSender.due`)."""
        return self.sender.due

    def _exact_deadline(self) -> float:
        due = (plane.next_deadline for edge in self._edges.values() for plane in edge.planes)
        return min(self._report_at, min(due, default=math.inf))

    def tick(self, now: float) -> None:
        """Do what is due; to be called by `next_deadline`, or more often."""
        for uid, number in self._broken:
            self.sender.pump(uid, self._edge(uid), number, now)
        self._broken.clear()
        self._report_at = math.inf
        for uid, edge in self._edges.items():
            for number, plane in enumerate(edge.planes):
                if plane.came.unreported:
                    self._acknowledge(uid, edge, number, now)
                if self.sender.stuck(uid, number, plane, now):
                    self.sender.renew(uid, edge, number)
                elif now >= plane.refused + plane.patience:
                    self.sender.renew(uid, edge, number)
                    self.sender.pump(uid, edge, number, now)
                self.sender.probe(uid, edge, number, now)
        self.sender.due = self._exact_deadline()

    def disconnected(self, uid: int, plane: int) -> None:
        """A connection broke that is made again by a login of its own. The next tick does, and asks what was lost."""
        self._port.renew(uid, plane)
        edge = self._edges.get(uid)
        if edge is not None and not edge.gone:
            edge.planes[plane].out.ask()
            self._broken.add((uid, plane))
            self.sender.due = -math.inf

    @property
    def breaks_matter(self) -> bool:
        """Whether connections that break are worth reporting: not while the run ends, here or for any peer."""
        return not self._closing and not any(edge.gone for edge in self._edges.values())

    def finished(self, now: float) -> bool:
        """While closing: whether every peer has everything. A dead control connection is soon made again, as the last
        that a node says, its closing figures, goes over it; bulk may take its time on a slow one."""
        if not self._closing:
            self._closing = True
            for uid, edge in self._edges.items():
                for number, plane in enumerate(edge.planes):
                    if plane.came.unreported:
                        self._acknowledge(uid, edge, number, now)
                    if number == CONTROL:
                        plane.close(now)
                    else:
                        plane.out.ask()
                    self.sender.probe(uid, edge, number, now)
                    self.sender.due_by(plane.next_deadline)
        return not any(plane.out.kept or plane.queue for edge in self._edges.values() for plane in edge.planes)

    def goodbye(self, now: float) -> None:
        """The last message: nothing more comes, and nothing is read any more."""
        for uid, edge in self._edges.items():
            if not edge.left:
                edge.forget()
                edge.planes[CONTROL].urgent.append((codec.encode(self._message(Bye)), "protocol"))
                self.sender.pump(uid, edge, CONTROL, now)
