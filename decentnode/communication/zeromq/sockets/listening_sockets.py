"""The sockets at which a node listens, one ROUTER per plane: received messages are classified and passed to the
handler."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from decentnode import clock
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.communication.zeromq.sockets import connections
from decentnode.communication.zeromq.sockets.relayed_frames import OWN_LINGER_SECONDS, RelayedFrames
from decentnode.communication.zeromq.sockets.security import GUEST_PREFIX
from decentnode.communication.zeromq.sockets.socket_parts import BROKEN_HANDSHAKES, NOW, READABLE, SocketParts
from decentnode.wire.generation import Caller
from decentnode.wire.relay import ROUTE_PREFIX, RelayHub

RECEIVE_BURST = 64
"""Most messages that are read from one socket before the others are polled; fewer if the sockets are to change between
the I/O thread and the training thread."""


def _address(frame: zmq.Frame) -> str:
    """Returns the address of the other end of the connection on which a frame arrived; "" for one within the host."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


class ListeningSockets:
    """The listening sockets of one node. Used by the I/O thread."""

    def __init__(self, parts: SocketParts, max_bulk_bytes: int, has_urgent_work: Callable[[], bool]) -> None:
        """max_bulk_bytes: largest bulk frame. has_urgent_work: returns whether the I/O thread has something more urgent
        to do than to read the rest of a burst."""
        self._parts, self._handler, self._security = parts, parts.handler, parts.security
        self._has_urgent_work = has_urgent_work
        self.unread_planes: set[int] = set()
        """Planes whose sockets may have unread messages."""
        self.relayed: RelayedFrames | None = None
        """Forwards the frames of other nodes if this node is a relay; `become_relay` sets it."""
        limits = (CONTROL, connections.MAX_CONTROL_BYTES), (BULK, max_bulk_bytes)
        self.by_plane = [self._create_listener(plane, max_bytes) for plane, max_bytes in limits]
        self._monitors = [self._monitor(each) for each in self.by_plane]

    def _create_listener(self, plane: int, max_bytes: int) -> zmq.Socket[bytes]:
        parts = self._parts
        keyring = None if parts.security is None else parts.security.keyring
        made = connections.listener(parts.context, max_bytes, keyring, plain=parts.by_credential(plane))
        parts.watched.add(made, lambda: self._receive(plane, made))
        return made

    def _monitor(self, listener: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        monitor: zmq.Socket[bytes] = listener.get_monitor_socket(BROKEN_HANDSHAKES | zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        self._parts.watched.add(monitor, lambda: self._read_monitor(monitor))
        return monitor

    def become_relay(self, hub: RelayHub) -> None:
        """Makes this node a relay, which forwards bytes between others; called before the start."""
        self.relayed = RelayedFrames(hub, self.by_plane[CONTROL], self._handler, self._identity())

    def _identity(self) -> bytes:
        uid = self._parts.uid
        return b"%d" % uid if self._security is None else self._security.keyring.public[uid]

    # -- received messages ------------------------------------------------------------------------------------

    def read_unread(self) -> bool:
        """Reads messages that were left unread; returns whether there were any."""
        left = [plane for plane in self.unread_planes if int(self.by_plane[plane].getsockopt(zmq.EVENTS)) & READABLE]
        self.unread_planes.clear()
        for plane in left:
            self._receive(plane, self.by_plane[plane])
        return bool(left)

    def _receive(self, plane: int, listener: zmq.Socket[bytes]) -> None:
        secure = self._security is not None
        recv, received, lock = listener.recv, self._handler.received, self._handler.lock
        for _ in range(RECEIVE_BURST):
            try:
                route = recv(NOW)  # the sender's routing id, which does not authenticate it
            except zmq.Again:
                return
            frame = recv(NOW, copy=False)
            frames = [frame.buffer]  # the buffer keeps the frame alive
            while frame.more:
                frame = recv(NOW, copy=False)
                frames.append(frame.buffer)
            user = str(frame.get("User-Id")).encode() if secure else b""
            if route[0] and route.startswith(ROUTE_PREFIX):
                if self.relayed is not None and plane == CONTROL and len(frames) == 1:
                    self.relayed.forward(route, self._key_of(user), frames[0])
                continue
            if route[0]:  # it chose its own routing id: a newcomer, which waits for an answer
                reply = self._answer(plane, frames, user, _address(frame))
                if reply is not None:
                    with contextlib.suppress(zmq.ZMQError):
                        listener.send_multipart([route, reply], zmq.NOBLOCK)
                continue
            uid = None
            if secure:
                found = self._uid_of(user)
                if found is None:
                    self._handler.connection_event("stranger", "", "who speaks before it is admitted")
                    continue
                uid = found
            with lock:
                received(plane, frames, uid, clock.now())
            if self._has_urgent_work():
                break
        self.unread_planes.add(plane)

    def _answer(self, plane: int, frames: list[memoryview], user: bytes, address: str) -> bytes | None:
        """Returns the answer to a node that asks to be admitted, for the same connection; None for no answer."""
        key = self._key_of(user)
        with self._handler.lock:
            return self._handler.knocked(plane, frames, Caller(key.decode(), address), clock.now())

    def _uid_of(self, user: bytes) -> int | None:
        """Returns the uid of the node at a connection; None if it has no uid (yet)."""
        if not user.startswith(GUEST_PREFIX):
            return int(user)
        assert self._security is not None
        return self._security.keyring.uid_of.get(user.removeprefix(GUEST_PREFIX))

    def _key_of(self, user: bytes) -> bytes:
        """Returns the public key that a connection has proved; b"" if none."""
        if self._security is None:
            return b""
        if user.startswith(GUEST_PREFIX):
            return user.removeprefix(GUEST_PREFIX)
        return self._security.keyring.public[int(user)]

    def _read_monitor(self, monitor: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(monitor, zmq.NOBLOCK)
                at, kind, detail = bytes(event["endpoint"]).decode(errors="replace"), "connection_lost", ""
                if event["event"] != zmq.EVENT_DISCONNECTED:
                    kind, detail = "handshake_failed", connections.HANDSHAKE_FAILURES.get(int(event["value"]), "")
                self._handler.connection_event(kind, at, detail)

    # -- the end ----------------------------------------------------------------------------------------------

    def release(self, left_seconds: float) -> None:
        """Closes the sockets, after the sending sockets were closed. left_seconds: if not 0, there is time to forward
        last messages."""
        control = self.by_plane[CONTROL]
        if self.relayed is not None and left_seconds and not control.closed:
            self._forward_own_last_messages(self.relayed, control)
        for listener, monitor in zip(self.by_plane, self._monitors, strict=True):
            connections.end_monitor(listener, monitor)
            listener.close(linger=0)

    def _forward_own_last_messages(self, relayed: RelayedFrames, listener: zmq.Socket[bytes]) -> None:
        """Forwards this node's own last messages, which may go through its own relay. Blocks for up to
        OWN_LINGER_SECONDS; drops all received messages that are not relay frames."""
        until = clock.now() + OWN_LINGER_SECONDS
        while relayed.hub.has_streams_of(self._identity()) and (remaining := until - clock.now()) > 0:
            if not listener.poll(math.ceil(1000 * remaining)):
                return
            with contextlib.suppress(zmq.Again):
                while True:
                    route = listener.recv(NOW)
                    last = listener.recv(NOW, copy=False)
                    frames = [last.buffer]
                    while last.more:
                        last = listener.recv(NOW, copy=False)
                        frames.append(last.buffer)
                    if route.startswith(ROUTE_PREFIX) and len(frames) == 1:
                        user = str(last.get("User-Id")).encode() if self._security is not None else b""
                        relayed.forward(route, self._key_of(user), frames[0])
