"""A node's connections to relays, in a thread of its own: by them it is reached, and reaches others (wire/relay.py).

Sockets of ZeroMQ know nothing of it. Towards a node behind a relay they connect to a Unix socket of this process, whose
bytes go through a stream; at the other end a stream is a connection to the node's own listening socket. So whatever
holds for a connection holds for a stream: where a relay dies, both ends see a connection that broke, ZeroMQ makes
another, and that one goes through the next relay.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from decentnode import clock, entropy, logs
from decentnode.communication.parts import Endpoints
from decentnode.communication.waker import Waker
from decentnode.communication.zeromq import connections
from decentnode.communication.zeromq.security import Keyring
from decentnode.errors import PeerFault
from decentnode.wire.relay import (
    CLOSE,
    CREDIT,
    DATA,
    HELLO,
    OPEN,
    OPENED,
    PIECE_BYTES,
    PING,
    RELAY_MESSAGES,
    RELAY_VERSION,
    RESET,
    ROUTE,
    STREAM_BYTES,
    Frame,
    order,
)

logger = logging.getLogger(__name__)

OFFERS = 2
"""Relays at which a node offers itself: where one dies, the other is there already."""
PING_SECONDS, SILENT_SECONDS = 1.0, 3.0
"""How often a relay is asked whether it lives, and after how long a silence it is given up."""
HELLO_SECONDS = 0.25
"""Time between two questions of a node that its relay does not know yet."""
DOWN_SECONDS = 2.0
"""How long a relay that was given up is left alone, where there are others."""
RETRY_SECONDS = 0.1
"""How long a connection waits that no relay had a stream for, until all are asked again: ZeroMQ would make another at
once, as it could connect to this process."""
DIAL_SECONDS = 3.0
"""How long a relay may take to make a stream before another is asked."""
CLOSE_SECONDS = 1.0
"""How long the last bytes of streams have to leave, at the end."""
BACKLOG = 64
BURST = 64
"""Frames taken from one relay before other sockets are looked at."""
_BROKEN = (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
           | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
           | zmq.EVENT_HANDSHAKE_FAILED_AUTH)  # fmt: skip


@dataclass(frozen=True)
class RelayPlan:
    """What one node has to know of relays."""

    uid: int
    identity: Callable[[int], bytes]
    """Of a uid: its public key, or where nodes have none, the uid in ASCII digits."""
    relays: Sequence[int]
    """Nodes that are relays, ascending."""
    control_of: Callable[[int], tuple[str, bool]]
    """Where a relay's control socket listens, and whether by IPv6; asked for this node itself, too."""
    own: Endpoints
    """Where this node listens, for itself."""
    offers: bool
    """Whether others reach it through relays alone."""
    keyring: Keyring | None


class _Uplink:
    """A connection to a relay."""

    def __init__(self, uid: int, socket_: zmq.Socket[bytes], now: float) -> None:
        self.uid, self.socket = uid, socket_
        self.monitor: zmq.Socket[bytes] = socket_.get_monitor_socket(_BROKEN)
        self.monitor.linger = 0
        self.streams: dict[int, _Stream] = {}
        self.next_stream = 2
        self.heard = now
        self.said = -math.inf
        """When it was last asked something."""
        self.known = False
        """Whether the relay knows this node."""


@dataclass(eq=False)
class _Stream:
    """One end of a stream, and the local connection that it stands for."""

    local: socket.socket
    plane: int
    to: int = -1
    """The uid that it was dialed for; -1 of one that came."""
    left: list[int] = field(default_factory=list)
    """Relays that were not asked yet."""
    uplink: _Uplink | None = None
    number: int = 0
    opened: bool = False
    asked: float = 0.0
    credit: int = STREAM_BYTES
    """Bytes that may be sent."""
    waiting: bytearray = field(default_factory=bytearray)
    """Bytes for the local connection that it does not take yet."""
    used: int = 0
    """Bytes that it took since the other end was last told."""
    over: bool = False
    """Whether the other end sends nothing more."""


class RelayEnd(threading.Thread):
    """The relayed connections of one node, from the first `reach` or `offer` until `close`."""

    def __init__(self, plan: RelayPlan) -> None:
        super().__init__(name=f"relay-{plan.uid}", daemon=True)
        self._plan = plan
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = Waker()
        self._lock = threading.Lock()
        """Of `_reached` and `_fresh`."""
        self._reached: dict[int, Endpoints] = {}
        self._fresh: deque[tuple[socket.socket, int, int]] = deque()
        """(listening socket, uid, plane) that the thread does not know yet: two for each node behind a relay."""
        self._listeners: dict[int, tuple[socket.socket, int, int]] = {}
        self._uplinks: dict[int, _Uplink] = {}
        self._down: dict[int, float] = {}
        """Relay -> until when it is left alone."""
        self._streams: set[_Stream] = set()
        self._closing = math.inf

    # -- any thread -------------------------------------------------------------------------------------------

    def reach(self, uid: int) -> Endpoints:
        """Returns where this node's sockets connect to, to reach `uid` through relays; not blocking."""
        with self._lock:
            if uid not in self._reached:
                names = []
                for plane in (0, 1):
                    # an abstract name leaves no file behind, whatever becomes of this process
                    names.append(f"decentnode-relay-{os.getpid()}-{entropy.word(8)}")
                    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                    listener.bind(f"\0{names[-1]}")
                    listener.listen(BACKLOG)
                    self._fresh.append((listener, uid, plane))
                self._reached[uid] = f"ipc://@{names[0]}", f"ipc://@{names[1]}"
            found = self._reached[uid]
        self._waker.wake()
        return found

    def close(self) -> None:
        """End the thread, once the last bytes have left. Blocking for CLOSE_SECONDS at most, and some."""
        self._closing = clock.now() + CLOSE_SECONDS
        self._waker.wake()
        if self.is_alive():
            self.join(2 * CLOSE_SECONDS)
        else:
            self._release()

    # -- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        with logs.of_node(self._plan.uid):
            try:
                while not self._over():
                    self._step()
            except Exception:
                logger.exception("relayed connections failed")
            finally:
                self._release()

    def _over(self) -> bool:
        now = clock.now()
        if now < self._closing - CLOSE_SECONDS:
            return False
        return not any(stream.opened for stream in self._streams) or now >= self._closing

    def _step(self) -> None:
        now = clock.now()
        with self._lock:
            while self._fresh:
                fresh = self._fresh.popleft()
                self._listeners[fresh[0].fileno()] = fresh
        self._tick(now)
        poller, streams = zmq.Poller(), {}
        poller.register(self._waker.descriptor, zmq.POLLIN)
        for descriptor in self._listeners:
            poller.register(descriptor, zmq.POLLIN)
        for stream in self._streams:
            events = (zmq.POLLIN if stream.opened and stream.credit > 0 and not stream.over else 0)
            events |= zmq.POLLOUT if stream.waiting else 0
            if events:
                streams[stream.local.fileno()] = stream
                poller.register(stream.local.fileno(), events)
        uplinks = {}
        for uplink in self._uplinks.values():
            uplinks[uplink.socket], uplinks[uplink.monitor] = uplink, uplink
            poller.register(uplink.socket, zmq.POLLIN)
            poller.register(uplink.monitor, zmq.POLLIN)
        for source, events in poller.poll(100):
            if isinstance(source, zmq.Socket):
                self._hear(uplinks[source], source)
            elif source == self._waker.descriptor:
                self._waker.clear()
            elif source in self._listeners:
                self._accept(*self._listeners[source])
            elif (stream := streams[source]) in self._streams:
                if events & zmq.POLLOUT:
                    self._write(stream)
                if events & ~zmq.POLLOUT and stream in self._streams:
                    self._read(stream)

    def _tick(self, now: float) -> None:
        """Look after relays: those that are silent are given up, and there are enough at which the node offers
        itself."""
        for uplink in list(self._uplinks.values()):
            if now - uplink.heard > SILENT_SECONDS:
                self._give_up(uplink, now, "is silent")
            elif not uplink.known and now - uplink.said > HELLO_SECONDS:
                self._greet(uplink, now)
            elif now - uplink.said > PING_SECONDS:
                uplink.said = now
                self._say(uplink, Frame(PING))
        for stream in [each for each in self._streams if not each.opened]:
            if stream.uplink is None and now - stream.asked > RETRY_SECONDS:
                self._dial(stream, now)
            elif now - stream.asked > DIAL_SECONDS:
                self._dial_next(stream, now)
        if self._plan.offers and now < self._closing - CLOSE_SECONDS:
            for uid in order(self._plan.uid, list(self._plan.relays)):
                if len(self._uplinks) >= OFFERS:
                    break
                if uid not in self._uplinks and now >= self._down.get(uid, 0.0):
                    self._uplink(uid, now)

    # -- relays -----------------------------------------------------------------------------------------------

    def _uplink(self, uid: int, now: float) -> _Uplink:
        """The connection to a relay, made where there is none."""
        if uid in self._uplinks:
            return self._uplinks[uid]
        (at, by_ipv6), keyring = self._plan.control_of(uid), self._plan.keyring
        made = connections.sender(self._context, RELAY_MESSAGES, by_ipv6)
        made.rcvhwm = RELAY_MESSAGES
        made.maxmsgsize = 2 * PIECE_BYTES
        made.setsockopt(zmq.RECONNECT_IVL, -1)
        made.setsockopt(zmq.ROUTING_ID, ROUTE + entropy.draw(8))
        if keyring is not None:
            connections.log_in_by_key(made, keyring, uid)
        uplink = self._uplinks[uid] = _Uplink(uid, made, now)
        made.connect(at)
        self._greet(uplink, now)
        return uplink

    def _greet(self, uplink: _Uplink, now: float) -> None:
        uplink.said = now
        identity = self._plan.identity(self._plan.uid)
        self._say(uplink, Frame(HELLO, plane=int(self._plan.offers), number=RELAY_VERSION, body=identity))

    def _say(self, uplink: _Uplink, frame: Frame) -> None:
        if uplink.uid not in self._uplinks:
            return
        try:
            uplink.socket.send(frame.encoded(), zmq.NOBLOCK)
        except zmq.Again:
            self._give_up(uplink, clock.now(), "takes nothing")

    def _give_up(self, uplink: _Uplink, now: float, why: str) -> None:
        """A relay is gone: its streams are over, and what was not opened yet goes through the next."""
        if self._uplinks.pop(uplink.uid, None) is None:
            return
        logger.info("relay %d %s", uplink.uid, why)
        self._down[uplink.uid] = now + DOWN_SECONDS
        connections.end_monitor(uplink.socket, uplink.monitor)
        uplink.socket.close(linger=0)
        for stream in list(uplink.streams.values()):
            stream.uplink = None
            if stream.opened:
                self._drop(stream)
            else:
                self._dial_next(stream, now)

    def _hear(self, uplink: _Uplink, source: zmq.Socket[bytes]) -> None:
        if source.closed or uplink.uid not in self._uplinks:
            return
        now = clock.now()
        if source is uplink.monitor:
            self._give_up(uplink, now, "broke the connection")
            return
        for _ in range(BURST):
            try:
                raw = uplink.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            if raw.more:
                self._give_up(uplink, now, "speaks no protocol of relays")
                return
            try:
                frame = Frame.decoded(raw.buffer)
            except PeerFault as fault:
                self._give_up(uplink, now, str(fault))
                return
            uplink.heard = now
            self._on_frame(uplink, frame, now)
            if uplink.uid not in self._uplinks:
                return

    def _on_frame(self, uplink: _Uplink, frame: Frame, now: float) -> None:
        stream = uplink.streams.get(frame.stream)
        if frame.kind == HELLO:
            if frame.number and not uplink.known:
                uplink.known = True
                for waiting in [each for each in self._streams if not each.opened and each.uplink is None]:
                    self._dial(waiting, now)
        elif frame.kind == RESET and uplink.known:
            self._give_up(uplink, now, "knows nothing of this node any more")
        elif frame.kind == RESET:
            for dialed in [each for each in uplink.streams.values() if not each.opened]:
                self._dial_next(dialed, now)
        elif frame.kind == OPEN and stream is None:
            self._on_open(uplink, frame)
        elif stream is None:
            return
        elif frame.kind == OPENED:
            stream.opened = True
        elif frame.kind == CREDIT:
            stream.credit = min(STREAM_BYTES, stream.credit + frame.number)
        elif frame.kind == CLOSE and not stream.opened:
            self._leave(stream)
            self._dial_next(stream, now)
        elif frame.kind == CLOSE:
            self._leave(stream)
            stream.over = True
            self._write(stream)
        elif frame.kind == DATA:
            stream.waiting += frame.body
            if len(stream.waiting) > STREAM_BYTES:  # more than it was allowed
                self._end(stream)
            else:
                self._write(stream)

    def _on_open(self, uplink: _Uplink, frame: Frame) -> None:
        """Somebody wants to connect to this node."""
        try:
            local = _connected(self._plan.own[frame.plane])
        except OSError as error:
            logger.warning("a relayed connection: %s", error)
            self._say(uplink, Frame(CLOSE, frame.stream))
            return
        made = _Stream(local, frame.plane, uplink=uplink, number=frame.stream, opened=True)
        uplink.streams[frame.stream] = made
        self._streams.add(made)
        self._say(uplink, Frame(OPENED, frame.stream))

    # -- streams ----------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, uid: int, plane: int) -> None:
        """This node's own socket connects towards `uid`."""
        with contextlib.suppress(OSError):
            local, _ = listener.accept()
            local.setblocking(False)
            credentials = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[0] != os.getpid():  # of another process of this host
                local.close()
                return
            made = _Stream(local, plane, uid)
            self._streams.add(made)
            self._dial(made, clock.now())

    def _dial(self, stream: _Stream, now: float) -> None:
        """Ask one relay after the other for a stream."""
        relays = order(stream.to, [each for each in self._plan.relays if each != stream.to])
        stream.left = [each for each in relays if now >= self._down.get(each, 0.0)]
        self._dial_next(stream, now)

    def _dial_next(self, stream: _Stream, now: float) -> None:
        """Ask the next relay for a stream; where none is left, all again after RETRY_SECONDS."""
        self._leave(stream, told=True)
        if not stream.left:
            stream.asked = now
            return
        uplink = self._uplink(stream.left.pop(0), now)
        stream.uplink, stream.number, stream.asked = uplink, uplink.next_stream, now
        uplink.next_stream += 2
        uplink.streams[stream.number] = stream
        self._say(uplink, Frame(OPEN, stream.number, stream.plane, body=self._plan.identity(stream.to)))

    def _read(self, stream: _Stream) -> None:
        try:
            body = stream.local.recv(min(PIECE_BYTES, stream.credit))
        except BlockingIOError:
            return
        except OSError:
            body = b""
        if not body or stream.uplink is None:
            self._end(stream)
            return
        stream.credit -= len(body)
        self._say(stream.uplink, Frame(DATA, stream.number, stream.plane, body=body))

    def _write(self, stream: _Stream) -> None:
        try:
            while stream.waiting:
                sent = stream.local.send(stream.waiting)
                del stream.waiting[:sent]
                stream.used += sent
        except BlockingIOError:
            pass
        except OSError:
            self._end(stream)
            return
        if stream.over:
            if not stream.waiting:
                self._drop(stream)
        elif stream.used >= STREAM_BYTES // 2 and stream.uplink is not None:
            used, stream.used = stream.used, 0
            self._say(stream.uplink, Frame(CREDIT, stream.number, stream.plane, used))

    def _leave(self, stream: _Stream, told: bool = False) -> None:
        """A stream goes through its relay no more; told: the other end is to hear of it."""
        uplink, stream.uplink = stream.uplink, None
        if uplink is not None and uplink.streams.pop(stream.number, None) is not None and told:
            self._say(uplink, Frame(CLOSE, stream.number))

    def _end(self, stream: _Stream) -> None:
        self._leave(stream, told=True)
        self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        stream.local.close()

    def _release(self) -> None:
        for uplink in self._uplinks.values():
            connections.end_monitor(uplink.socket, uplink.monitor)
            uplink.socket.close(linger=int(1000 * CLOSE_SECONDS / 2))
        for stream in list(self._streams):
            stream.local.close()
        with self._lock:
            for listener, *_ in [*self._listeners.values(), *self._fresh]:
                listener.close()
        self._waker.close()
        self._context.term()


def _connected(at: str) -> socket.socket:
    """A connection to this node's own listening socket. Raises OSError."""
    if at.startswith("ipc://"):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.connect(at.removeprefix("ipc://"))
    else:
        host, _, port = at.removeprefix("tcp://").rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host).strip("[]")
        local = socket.create_connection((host, int(port)), timeout=CLOSE_SECONDS)
        local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    local.setblocking(False)
    return local
