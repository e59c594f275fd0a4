"""Streams through relays. Each replaces one connection: it carries the bytes between a local socket of this process and
the node at the other end (wire/relay.py)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import zmq

from decentnode import clock
from decentnode.communication.zeromq.relays.relay_uplinks import RelayPlan, Uplink, Uplinks
from decentnode.wire.relay import (
    CLOSE,
    CREDIT,
    DATA,
    OPEN,
    OPENED,
    PIECE_BYTES,
    STREAM_BYTES,
    Frame,
    relay_order,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""How long a connection for which no relay had a stream waits until all relays are asked again. It is not closed,
because ZeroMQ, which can always connect to this process, would connect again at once."""
DIAL_SECONDS = 3.0
"""How long a relay may take to open a stream before another relay is asked."""
CONNECT_SECONDS = 1.0
"""How long this node's own listening socket may take to accept a connection."""


@dataclass(eq=False)
class Stream:
    """One end of a stream, with its local connection."""

    local: socket.socket
    plane: int
    target: int = -1
    """The uid to which this node opened the stream; -1 if another node opened it to this one."""
    untried_relays: list[int] = field(default_factory=list)
    """Relays that were not asked yet."""
    uplink: Uplink | None = None
    number: int = 0
    opened: bool = False
    asked_at: float = 0.0
    credit: int = STREAM_BYTES
    """Bytes that may still be sent."""
    unwritten: bytearray = field(default_factory=bytearray)
    """Bytes that were received and that the local connection does not accept yet."""
    written: int = 0
    """Bytes that the local connection accepted since the last CREDIT frame."""
    remote_closed: bool = False
    """Whether the other end sends nothing more."""

    @property
    def events(self) -> int:
        """The events to poll the local connection for; 0 for none."""
        events = zmq.POLLIN if self.opened and self.credit > 0 and not self.remote_closed else 0
        return events | (zmq.POLLOUT if self.unwritten else 0)


class RelayedStreams:
    """All streams of one node; the user of its uplinks (`UplinkUser`). Not thread-safe."""

    def __init__(self, plan: RelayPlan, uplinks: Uplinks) -> None:
        self._plan, self._uplinks = plan, uplinks
        self.all: set[Stream] = set()
        self._by_uplink = WeakKeyDictionary[Uplink, dict[int, Stream]]()
        """Uplink -> stream number -> stream, for the streams through each relay."""
        self._next_number = WeakKeyDictionary[Uplink, int]()
        """Uplink -> number of the next stream that this node opens through it."""

    def tick(self, now: float) -> None:
        """Asks the next relay for streams that were not opened in time."""
        for stream in [each for each in self.all if not each.opened]:
            if stream.uplink is None and now - stream.asked_at > RETRY_SECONDS:
                self._dial(stream, now)
            elif now - stream.asked_at > DIAL_SECONDS:
                self._dial_next(stream, now)

    def release(self) -> None:
        """Closes all local connections."""
        for stream in list(self.all):
            stream.local.close()

    # -- local connections ------------------------------------------------------------------------------------

    def accept(self, listener: socket.socket, uid: int, plane: int) -> None:
        """Accepts a connection of this node's own socket to `uid`, and opens a stream for it."""
        with contextlib.suppress(OSError):
            local, _ = listener.accept()
            local.setblocking(False)
            credentials = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[0] != os.getpid():  # another process on this host
                local.close()
                return
            made = Stream(local, plane, uid)
            self.all.add(made)
            self._dial(made, clock.now())

    def serve(self, stream: Stream, events: int) -> None:
        """Writes to and reads from the local connection, for which these events were polled."""
        if events & zmq.POLLOUT:
            self._write(stream)
        if events & ~zmq.POLLOUT and stream in self.all:
            self._read(stream)

    def _read(self, stream: Stream) -> None:
        try:
            body = stream.local.recv(min(PIECE_BYTES, stream.credit))
        except BlockingIOError:
            return
        except OSError:
            body = b""
        if not body or stream.uplink is None:
            self._close(stream)
            return
        stream.credit -= len(body)
        self._uplinks.send(stream.uplink, Frame(DATA, stream.number, stream.plane, body=body))

    def _write(self, stream: Stream) -> None:
        try:
            while stream.unwritten:
                sent = stream.local.send(stream.unwritten)
                del stream.unwritten[:sent]
                stream.written += sent
        except BlockingIOError:
            pass
        except OSError:
            self._close(stream)
            return
        if stream.remote_closed:
            if not stream.unwritten:
                self._discard(stream)
        elif stream.written >= STREAM_BYTES // 2 and stream.uplink is not None:
            used, stream.written = stream.written, 0
            self._uplinks.send(stream.uplink, Frame(CREDIT, stream.number, stream.plane, used))

    # -- calls of the uplinks (UplinkUser) --------------------------------------------------------------------

    def relay_is_ready(self, now: float) -> None:
        for waiting in [each for each in self.all if not each.opened and each.uplink is None]:
            self._dial(waiting, now)

    def refused(self, uplink: Uplink, now: float) -> None:
        for dialed in [each for each in self._by_uplink.get(uplink, {}).values() if not each.opened]:
            self._dial_next(dialed, now)

    def lost(self, uplink: Uplink, now: float) -> None:
        """Closes the streams through a lost relay; those that are not open yet are tried through the next relay."""
        for stream in self._by_uplink.pop(uplink, {}).values():
            stream.uplink = None
            if stream.opened:
                self._discard(stream)
            else:
                self._dial_next(stream, now)

    def receive(self, uplink: Uplink, frame: Frame, now: float) -> None:
        stream = self._by_uplink.get(uplink, {}).get(frame.stream)
        if frame.kind == OPEN and stream is None:
            self._accept_remote(uplink, frame)
        elif stream is None:
            return
        elif frame.kind == OPENED:
            stream.opened = True
        elif frame.kind == CREDIT:
            stream.credit = min(STREAM_BYTES, stream.credit + frame.number)
        elif frame.kind == CLOSE and not stream.opened:
            self._unassign(stream)
            self._dial_next(stream, now)
        elif frame.kind == CLOSE:
            self._unassign(stream)
            stream.remote_closed = True
            self._write(stream)
        elif frame.kind == DATA:
            stream.unwritten += frame.body
            if len(stream.unwritten) > STREAM_BYTES:  # more than its credit allows
                self._close(stream)
            else:
                self._write(stream)

    def _accept_remote(self, uplink: Uplink, frame: Frame) -> None:
        """Opens a stream that another node asked for, with a connection to this node's own listening socket."""
        try:
            local = _connect_to_self(self._plan.own[frame.plane])
        except OSError as error:
            logger.warning("a relayed connection: %s", error)
            self._uplinks.send(uplink, Frame(CLOSE, frame.stream))
            return
        made = Stream(local, frame.plane, opened=True)
        self._assign(made, uplink, frame.stream)
        self.all.add(made)
        self._uplinks.send(uplink, Frame(OPENED, frame.stream))

    # -- which relay a stream goes through --------------------------------------------------------------------

    def _dial(self, stream: Stream, now: float) -> None:
        """Asks one usable relay after the other for a stream, beginning with the first."""
        relays = relay_order(stream.target, [each for each in self._plan.relays if each != stream.target])
        stream.untried_relays = [each for each in relays if self._uplinks.is_usable(each, now)]
        self._dial_next(stream, now)

    def _dial_next(self, stream: Stream, now: float) -> None:
        """Asks the next relay for a stream; if none is left, all are asked again after RETRY_SECONDS."""
        self._unassign(stream, notify_peer=True)
        if not stream.untried_relays:
            stream.asked_at = now
            return
        uplink = self._uplinks.connect(stream.untried_relays.pop(0), now)
        number = self._next_number.get(uplink, 2)
        self._next_number[uplink], stream.asked_at = number + 2, now
        self._assign(stream, uplink, number)
        self._uplinks.send(uplink, Frame(OPEN, number, stream.plane, body=self._plan.identity(stream.target)))

    def _assign(self, stream: Stream, uplink: Uplink, number: int) -> None:
        """Assigns a stream to a relay."""
        stream.uplink, stream.number = uplink, number
        self._by_uplink.setdefault(uplink, {})[number] = stream

    def _unassign(self, stream: Stream, notify_peer: bool = False) -> None:
        """Removes a stream from its relay. notify_peer: a CLOSE frame tells the other end."""
        uplink, stream.uplink = stream.uplink, None
        if uplink is not None and self._by_uplink.get(uplink, {}).pop(stream.number, None) is not None and notify_peer:
            self._uplinks.send(uplink, Frame(CLOSE, stream.number))

    def _close(self, stream: Stream) -> None:
        self._unassign(stream, notify_peer=True)
        self._discard(stream)

    def _discard(self, stream: Stream) -> None:
        self.all.discard(stream)
        stream.local.close()


def _connect_to_self(at: str) -> socket.socket:
    """Returns a new connection to this node's own listening socket. Raises OSError."""
    if at.startswith("ipc://"):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.connect(at.removeprefix("ipc://"))
    else:
        host, _, port = at.removeprefix("tcp://").rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host).strip("[]")
        local = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    local.setblocking(False)
    return local
