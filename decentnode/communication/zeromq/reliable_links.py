"""Edges over the sockets: every message once and whole wherever connections break, windows, passes for bulk.

Control messages arrive in order; bulk messages in any order. The training thread and the I/O thread both send, each
holding `lock`: a message leaves at once from whoever has it. Never take `lock` while holding `Status.changed`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

import zmq

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.handshakes import Handshakes
from decentnode.communication.zeromq.io_thread import BULK, CONTROL, IoThread, Security
from decentnode.communication.zeromq.link_state import MAX_PAYLOADS, Channel, ExchangeKey, PeerLink, QueuedMessage
from decentnode.communication.zeromq.security import BulkCredential, Cipher
from decentnode.errors import PeerFault
from decentnode.metrics.figures import Purpose
from decentnode.wire import codec, framing, messages
from decentnode.wire.messages import (
    Ack,
    Ask,
    Bye,
    Credit,
    Hello,
    Message,
    Probe,
    Skipped,
)
from decentnode.wire.messages import Key as PassKey
from decentnode.wire.session import Session

logger = logging.getLogger(__name__)

EDGE_KINDS = frozenset({Ack, Probe, Credit, Ask, PassKey, Bye})
"""What an edge's two ends say to each other about the edge."""
BULK_KINDS, UNNUMBERED, MEMBERSHIP = map(frozenset, (messages.BULK, messages.UNNUMBERED, messages.MEMBERSHIP))
MAX_QUEUED = 20_000
"""Control messages that wait for one peer; beyond it the peer is given up."""
HELLOS_PER_CONNECTION, RENEW_SECONDS = 4, 2.0
DOUBT_SECONDS = 0.005
"""Least time between two acknowledgements that damaged messages of one peer bring about."""
ACK_EVERY = (256, 16)
"""Messages of a plane after which the sender is told at once; otherwise it is told at the next tick."""


class ReliableLinks:
    """One node's edges to all peers it ever speaks with."""

    def __init__(
        self, session: Session, window: int, max_bulk_bytes: int, counters: Counters, security: Security | None,
        deliver: Callable[[Message, memoryview | None], None], on_tick: Callable[[float], None],
        on_crash: Callable[[BaseException], None], on_word: Callable[[Message], None] | None = None,
    ) -> None:
        """deliver(message, body): called once for every message that is admitted. May raise PeerFault.

        on_word: called with what concerns membership, and with every Bye; without it, such words are refused.
        """
        self.passes: dict[int, BulkCredential] = {}
        """Passes that this node gave."""
        self.control_kind = framing.NONE
        """How control messages are protected against corruption."""
        self.lock = threading.RLock()
        self.io = IoThread(f"io-{session.uid}", max_bulk_bytes, self, security, self.passes)
        self._session, self.window, self._counters = session, window, counters
        self._deliver, self._on_tick, self.crashed = deliver, on_tick, on_crash
        self._on_word = on_word
        self._encrypts = security is not None and security.bulk == "aes-gcm"
        self._needs_pass = security is not None and security.bulk_needs_credential
        self._edges: dict[int, PeerLink] = {}
        self._credit_lock = threading.Lock()
        self._used: dict[int, int] = {}
        self._granted: dict[int, int] = {}
        self._closing = False
        self._broken: set[tuple[int, int]] = set()
        """(uid, plane) of connections to make again at the next tick."""
        self._handshakes = Handshakes(session, self.io.endpoints)
        self.on_room: Callable[[int], None] = lambda _uid: None
        """With `lock` held: a peer for which MAX_PAYLOADS waited takes payloads again."""

    # -- sending ----------------------------------------------------------------------------------------------

    def control(self, uid: int, message: Message) -> None:
        if isinstance(message, Hello):
            self._count_hello(uid)
        purpose: Purpose = "protocol" if type(message) in EDGE_KINDS else "control"
        self.control_header(uid, codec.encode(message), type(message) not in UNNUMBERED, purpose)

    def _count_hello(self, uid: int) -> None:
        """Hellos, said or heard, that go on and on mean that the answers get lost."""
        edge = self._edge(uid)
        edge.hellos += 1
        now = clock.now()
        if edge.hellos >= HELLOS_PER_CONNECTION and now >= edge.renewed + RENEW_SECONDS:
            edge.hellos, edge.renewed = 0, now
            self._renew(uid, edge, CONTROL)

    def control_header(
        self, uid: int, header: bytes, numbered: bool = True, purpose: Purpose = "control"
    ) -> None:
        """Send an encoded control message."""
        edge = self._edge(uid)
        plane = edge.planes[CONTROL]
        if edge.gone:
            return
        if numbered:
            kind = self.control_kind
            plane.queue.append(QueuedMessage(header, kind=kind, of_body=framing.body_sum(kind, b""), purpose=purpose))
            if len(plane.queue) > MAX_QUEUED:
                logger.warning("node %d takes no control messages: given up", uid)
                edge.forget()
        else:
            plane.urgent.append((header, purpose))
        self._pump(uid, edge, CONTROL)

    def takes(self, uid: int) -> bool:
        """Any thread: whether one more payload may wait for this peer. What is sent to one that is gone is dropped."""
        edge = self._edges.get(uid)
        return edge is None or edge.queued < MAX_PAYLOADS

    def withhold(self, uid: int, key: ExchangeKey) -> None:
        """With `lock` held: the payload of this (round, phase) is not sent. The peer is told as soon as it takes
        anything, so that it does not wait for what will not come."""
        edge = self._edge(uid)
        if not edge.gone:
            edge.withheld = (key if edge.withheld is None else edge.withheld[0], key)
            if edge.queued < MAX_PAYLOADS:
                self._has_room(uid, edge)

    def bulk(self, uid: int, message: QueuedMessage) -> None:
        """Send now, or as soon as the peer's window and the socket allow."""
        edge = self._edge(uid)
        if edge.gone:
            return
        edge.planes[BULK].queue.append(message)
        edge.queued += message.last
        if edge.needs_pass and not edge.asked:
            edge.asked = True
            self.control(uid, self._message(Ask))
        self._pump(uid, edge, BULK)

    def word(self, uid: int, message: Message) -> None:
        """Say something that is said again until it is answered: to anybody, also to peers that were given up."""
        first = framing.sealed(0, codec.encode(message), self.control_kind, framing.body_sum(self.control_kind, b""))
        if self.io.send(uid, CONTROL, first, None):
            self._counters.edge(uid).control_bytes_sent += len(first)

    def restart(self, fresh: Collection[int]) -> None:
        """With `lock` held: a new generation. Nothing of the old one is owed to anybody, and numbers start anew.

        fresh: peers whose processes are new, and what was queued for the old ones is not for them.
        """
        for uid, edge in self._edges.items():
            edge.forget()
            self.io.renew(uid, BULK)
            if uid in fresh:
                self.io.renew(uid, CONTROL)
        self._edges.clear()
        self.passes.clear()
        with self._credit_lock:
            self._used.clear()
            self._granted.clear()

    def hurry(self) -> None:
        """Ask every peer now what it has of the bulk sent so far."""
        with self.lock:
            for uid, edge in self._edges.items():
                if edge.planes[BULK].out.kept:
                    edge.planes[BULK].out.ask()
                    self._probe(uid, edge, BULK, clock.now())

    def writable(self, uid: int, plane: int) -> None:
        self._pump(uid, self._edge(uid), plane)

    def _edge(self, uid: int) -> PeerLink:
        found = self._edges.get(uid)
        if found is None:
            found = self._edges[uid] = PeerLink(self.window, self._needs_pass)
        return found

    def _message(self, kind: type[Message], *values: object) -> Message:
        session = self._session
        return kind(session.run, session.generation, session.uid, *values, origin=session.origin)

    def _pump(self, uid: int, edge: PeerLink, number: int) -> None:
        """Send what may leave, most urgent first, until the socket is full."""
        plane = edge.planes[number]
        if number == BULK and edge.needs_pass and edge.passes is None:
            return
        if (plane.urgent or plane.again) and not self._pump_urgent(uid, edge, number, plane):
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
            if not self.io.send(uid, number, sealed[0], sealed[1], edge.log_in):
                return
            out.keep(sealed, clock.now())
            plane.sealed = None
            queue.popleft()
            edge.sent += message.cost
            message.count(self._counters.edge(uid), sealed[0], sealed[1])
            if message.last:
                edge.queued -= 1
                if edge.queued == MAX_PAYLOADS - 1:
                    self._has_room(uid, edge)

    def _has_room(self, uid: int, edge: PeerLink) -> None:
        """A peer that had too many payloads waiting takes some again: tell it which ones it need not wait for."""
        if edge.withheld is not None:
            (round, phase), last = edge.withheld
            edge.withheld = None
            self.control(uid, self._message(Skipped, round, phase, *last))
        self.on_room(uid)

    def _pump_urgent(self, uid: int, edge: PeerLink, number: int, plane: Channel) -> bool:
        """Send what is not numbered, and what was lost; False when the socket is full."""
        counted = self._counters.edge(uid)
        while plane.urgent:
            header, purpose = plane.urgent[0]
            first = framing.sealed(0, header, self.control_kind, framing.body_sum(self.control_kind, b""))
            if not self.io.send(uid, number, first, None, edge.log_in):
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
                if not self.io.send(uid, number, first, body, edge.log_in):
                    return False
                plane.out.sent_again(sequence)
                counted.resends += 1
                counted.framing_bytes_sent += len(first) + (0 if body is None else len(body))
            del plane.again[sequence]
        return True

    # -- receiving --------------------------------------------------------------------------------------------

    def received(self, plane: int, frames: list[zmq.Frame], uid: int | None) -> None:
        """One message as it came from a socket; what is wrong with it is counted."""
        source: int | None = uid
        header = b""
        try:
            if len(frames) > 1 + (plane == BULK):
                raise PeerFault("malformed_multipart", f"{len(frames)} frames")
            sequence, kind, sum_, header, body = framing.opened(frames[0].buffer)
            joined = body is not None
            if len(frames) == 2:
                if joined:
                    raise PeerFault("malformed_multipart", "a body in either frame")
                body = frames[1].buffer
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
            self._admit(plane, sequence, kind, message, header, body)
        except PeerFault as fault:
            self.refuse(fault, source)
            if fault.reason == "checksum_mismatch":
                self._doubt(plane, header)

    def _doubt(self, plane: int, header: bytes) -> None:
        """Something was damaged on the way: tell whoever sent it, as far as the header is right, without waiting to be
        asked; so that it comes again at once, and the longer silence of a link that breaks often is not waited out."""
        try:
            message = codec.decode(header)
            self._session.belongs(message)
            edge = self._edge(message.source)
        except PeerFault as fault:
            if fault.reason == "protocol_version":  # another version's sums may be others
                self.refuse(fault)
            return
        now, came = clock.now(), edge.planes[plane].came
        came.gap = True
        if now - edge.doubted >= DOUBT_SECONDS:
            edge.doubted = now
            self._acknowledge(message.source, edge, plane)
        else:
            came.unreported += 1  # the next tick tells

    def _admit(
        self, plane: int, sequence: int, kind: int, message: Message, header: bytes, body: memoryview | None
    ) -> None:
        kind_of = type(message)
        if sequence:
            self._session.belongs(message)
            edge = self._edge(message.source)
            if body is not None and self._encrypts:
                body = self._decrypted(sequence, kind, message.source, header, body)
            stream = edge.planes[plane].came
            new = stream.take(sequence)
            if stream.gap or self._closing or stream.unreported >= ACK_EVERY[plane] or kind_of is Ask:
                self._acknowledge(message.source, edge, plane)
            if not new:
                return
            if body is not None:
                self._admit_bulk(edge, message, body)
                return
        if kind_of in EDGE_KINDS:
            self._session.admit(message)
            self._serve(plane, message)
        elif kind_of in MEMBERSHIP:
            if self._on_word is None:
                raise PeerFault("unexpected_message", f"{kind_of.__name__} in a run without generations")
            self._on_word(message)
        else:
            self._deliver(message, None)
            if kind_of is Hello:
                self._count_hello(message.source)

    def _admit_bulk(self, edge: PeerLink, message: Message, body: memoryview) -> None:
        cost = body.nbytes + MESSAGE_COST
        edge.came += cost
        try:
            if edge.came - self._used.get(message.source, 0) > self.window:
                raise PeerFault("window_exceeded", f"from {message.source}")
            self._session.admit(message)
            self._deliver(message, body)
        except PeerFault:
            self.consumed(message.source, cost)
            raise

    def _serve(self, plane: int, message: Message) -> None:
        uid = message.source
        edge = self._edge(uid)
        if isinstance(message, Ack):
            flow = edge.planes[message.plane]
            flow.again.update(dict.fromkeys(
                flow.out.acknowledged(message.first_missing, message.ahead, message.probe, clock.now())
            ))
            if message.gap:
                flow.out.ask()
                self._probe(uid, edge, message.plane, clock.now())
            self._pump(uid, edge, message.plane)
        elif isinstance(message, Probe):
            if message.plane != plane:
                raise PeerFault("wrong_plane", f"probe of plane {message.plane}")
            self._acknowledge(uid, edge, plane, message.probe)
        elif isinstance(message, Credit):
            if message.allowed > edge.allowed:
                edge.allowed = message.allowed
                self._pump(uid, edge, BULK)
        elif isinstance(message, Ask):
            if not self._needs_pass:
                raise PeerFault("unexpected_message", "Ask, but bulk needs no pass here")
            given = self.passes.setdefault(uid, BulkCredential())
            self.control(uid, self._message(PassKey, given.token, given.key))
        elif isinstance(message, PassKey):
            if not edge.asked:
                raise PeerFault("unexpected_message", "Key without having asked")
            if edge.passes is None:
                edge.passes = BulkCredential(message.token, message.key)
                edge.outwards = Cipher(edge.passes) if self._encrypts else None
            self._pump(uid, edge, BULK)
        elif isinstance(message, Bye):
            edge.left = True
            edge.forget()
            if self._on_word is not None:
                self._on_word(message)

    def _decrypted(self, sequence: int, kind: int, source: int, header: bytes, body: memoryview) -> memoryview:
        if kind != framing.AES_GCM or source not in self.passes:
            raise PeerFault("not_encrypted", f"from {source}")
        edge = self._edge(source)
        if edge.inwards is None:
            edge.inwards = Cipher(self.passes[source])
        return edge.inwards.decrypted(sequence, header, body)

    def _acknowledge(self, uid: int, edge: PeerLink, number: int, probe: int = 0) -> None:
        first_missing, ahead, gap = edge.planes[number].came.report()
        header = codec.encode(self._message(Ack, number, first_missing, ahead, int(gap), probe))
        self.control_header(uid, header, numbered=False, purpose="protocol")

    def _probe(self, uid: int, edge: PeerLink, number: int, now: float) -> None:
        plane = edge.planes[number]
        if plane.out.probe_due(now) and not edge.gone:
            plane.urgent.append((codec.encode(self._message(Probe, number, plane.out.probe(now))), "protocol"))
            self._pump(uid, edge, number)

    def forget(self, uid: int) -> None:
        """`uid` failed: nothing is owed to it any more."""
        self._edge(uid).forget()

    def refuse(self, fault: PeerFault, source: int | None = None) -> None:
        """Count a message that breaks the protocol."""
        known = self._counters.faults.get(fault.reason, 0)
        self._counters.fault(fault.reason, source, str(fault))
        if known < 3:
            logger.warning("refused a message: %s", fault)

    # -- windows ----------------------------------------------------------------------------------------------

    def consumed(self, uid: int, size: int) -> None:
        """Any thread: bytes of `uid` are used up; tell it when a good part of its window is free again."""
        with self._credit_lock:
            used = self._used[uid] = self._used.get(uid, 0) + size
            if used - self._granted.get(uid, 0) < self.window // 4:
                return
            self._granted[uid] = used
        allowed = used + self.window
        self.io.call(lambda: self.control(uid, self._message(Credit, allowed)))

    # -- time -------------------------------------------------------------------------------------------------

    def connection_event(self, kind: str, address: str, detail: str = "") -> None:
        """Somebody was refused (counted), or a connection broke."""
        if kind != "connection_lost":
            self.refuse(PeerFault(kind, f"{address} {detail}".strip()))
            with self.lock:
                self._handshakes.refused_here(kind, address, detail)
        elif not self._closing and not any(edge.gone for edge in self._edges.values()):
            self._counters.on_event(kind, None, address)

    def handshake_refused(self, uid: int, code: int) -> None:
        """With `lock` held: `uid` did not take this node's hand."""
        self._handshakes.refused_there(uid, code)

    def disconnected(self, uid: int, plane: int) -> None:
        """With `lock` held: a connection broke that is made again by a login of its own. The next tick does, and asks
        what was lost."""
        self.io.renew(uid, plane)
        edge = self._edges.get(uid)
        if edge is not None and not edge.gone:
            edge.planes[plane].out.ask()
            self._broken.add((uid, plane))

    def tick(self, now: float) -> None:
        self._on_tick(now)
        for uid, number in self._broken:
            self._pump(uid, self._edge(uid), number)
        self._broken.clear()
        for uid, edge in self._edges.items():
            for number, plane in enumerate(edge.planes):
                if plane.came.unreported:
                    self._acknowledge(uid, edge, number)
                if plane.out.stuck(now):
                    self._renew(uid, edge, number)
                self._probe(uid, edge, number, now)

    def _renew(self, uid: int, edge: PeerLink, number: int) -> None:
        """Make a new connection, and ask behind it what was lost with the old one."""
        self._counters.on_event("connection_renewed", uid, f"plane {number}")
        self.io.renew(uid, number)
        edge.planes[number].out.ask()

    def finished(self) -> bool:
        """While closing: whether every peer has everything."""
        if not self._closing:
            self._closing = True
            for uid, edge in self._edges.items():
                for number, plane in enumerate(edge.planes):
                    if plane.came.unreported:
                        self._acknowledge(uid, edge, number)
                    plane.out.ask()
                    self._probe(uid, edge, number, clock.now())
        return not any(plane.out.kept or plane.queue for edge in self._edges.values() for plane in edge.planes)

    def goodbye(self) -> None:
        """The last thing said: nothing more comes, nothing is read any more."""
        for uid, edge in self._edges.items():
            if not edge.left:
                edge.forget()
                edge.planes[CONTROL].urgent.append((codec.encode(self._message(Bye)), "protocol"))
                self._pump(uid, edge, CONTROL)
