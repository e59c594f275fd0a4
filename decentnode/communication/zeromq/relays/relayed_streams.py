"""Streams through relays: each stands for one connection, whose bytes it carries between a local socket of this process
and the node at the other end (wire/relay.py)."""

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
    order,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.1
"""How long a connection waits that no relay had a stream for, until all are asked again: ZeroMQ would make another at
once, as it could connect to this process."""
DIAL_SECONDS = 3.0
"""How long a relay may take to make a stream before another is asked."""
CONNECT_SECONDS = 1.0
"""How long this node's own listening socket may take to accept a connection."""


@dataclass(eq=False)
class Stream:
    """One end of a stream, and the local connection that it stands for."""

    local: socket.socket
    plane: int
    to: int = -1
    """The uid that it was dialed for; -1 of one that came."""
    left: list[int] = field(default_factory=list)
    """Relays that were not asked yet."""
    uplink: Uplink | None = None
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

    @property
    def events(self) -> int:
        """What to poll the local connection for; 0 for nothing."""
        events = zmq.POLLIN if self.opened and self.credit > 0 and not self.over else 0
        return events | (zmq.POLLOUT if self.waiting else 0)


class RelayedStreams:
    """Those of one node, over its uplinks, and their user (`UplinkUser`). Used from one thread."""

    def __init__(self, plan: RelayPlan, uplinks: Uplinks) -> None:
        self._plan, self._uplinks = plan, uplinks
        self.all: set[Stream] = set()
        self._through = WeakKeyDictionary[Uplink, dict[int, Stream]]()
        """Those that go through a relay, by their numbers there."""
        self._next_number = WeakKeyDictionary[Uplink, int]()
        """Of streams that this node asks for."""

    def tick(self, now: float) -> None:
        """Ask the next relay for the streams that were asked for long enough."""
        for stream in [each for each in self.all if not each.opened]:
            if stream.uplink is None and now - stream.asked > RETRY_SECONDS:
                self._dial(stream, now)
            elif now - stream.asked > DIAL_SECONDS:
                self._dial_next(stream, now)

    def release(self) -> None:
        """Close all local connections."""
        for stream in list(self.all):
            stream.local.close()

    # -- local connections ------------------------------------------------------------------------------------

    def accept(self, listener: socket.socket, uid: int, plane: int) -> None:
        """This node's own socket connects towards `uid`."""
        with contextlib.suppress(OSError):
            local, _ = listener.accept()
            local.setblocking(False)
            credentials = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[0] != os.getpid():  # of another process of this host
                local.close()
                return
            made = Stream(local, plane, uid)
            self.all.add(made)
            self._dial(made, clock.now())

    def serve(self, stream: Stream, events: int) -> None:
        """The local connection takes bytes or has some, or broke."""
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
            self._end(stream)
            return
        stream.credit -= len(body)
        self._uplinks.say(stream.uplink, Frame(DATA, stream.number, stream.plane, body=body))

    def _write(self, stream: Stream) -> None:
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
            self._uplinks.say(stream.uplink, Frame(CREDIT, stream.number, stream.plane, used))

    # -- what comes through relays (UplinkUser) ---------------------------------------------------------------

    def known(self, now: float) -> None:
        for waiting in [each for each in self.all if not each.opened and each.uplink is None]:
            self._dial(waiting, now)

    def refused(self, uplink: Uplink, now: float) -> None:
        for dialed in [each for each in self._through.get(uplink, {}).values() if not each.opened]:
            self._dial_next(dialed, now)

    def lost(self, uplink: Uplink, now: float) -> None:
        """Its streams are over, and what was not opened yet goes through the next."""
        for stream in self._through.pop(uplink, {}).values():
            stream.uplink = None
            if stream.opened:
                self._drop(stream)
            else:
                self._dial_next(stream, now)

    def take(self, uplink: Uplink, frame: Frame, now: float) -> None:
        stream = self._through.get(uplink, {}).get(frame.stream)
        if frame.kind == OPEN and stream is None:
            self._take_open(uplink, frame)
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

    def _take_open(self, uplink: Uplink, frame: Frame) -> None:
        """Somebody wants to connect to this node."""
        try:
            local = _connected(self._plan.own[frame.plane])
        except OSError as error:
            logger.warning("a relayed connection: %s", error)
            self._uplinks.say(uplink, Frame(CLOSE, frame.stream))
            return
        made = Stream(local, frame.plane, opened=True)
        self._lead(made, uplink, frame.stream)
        self.all.add(made)
        self._uplinks.say(uplink, Frame(OPENED, frame.stream))

    # -- which relay a stream goes through --------------------------------------------------------------------

    def _dial(self, stream: Stream, now: float) -> None:
        """Ask one relay after the other for a stream."""
        relays = order(stream.to, [each for each in self._plan.relays if each != stream.to])
        stream.left = [each for each in relays if self._uplinks.usable(each, now)]
        self._dial_next(stream, now)

    def _dial_next(self, stream: Stream, now: float) -> None:
        """Ask the next relay for a stream; where none is left, all again after RETRY_SECONDS."""
        self._leave(stream, told=True)
        if not stream.left:
            stream.asked = now
            return
        uplink = self._uplinks.made(stream.left.pop(0), now)
        number = self._next_number.get(uplink, 2)
        self._next_number[uplink], stream.asked = number + 2, now
        self._lead(stream, uplink, number)
        self._uplinks.say(uplink, Frame(OPEN, number, stream.plane, body=self._plan.identity(stream.to)))

    def _lead(self, stream: Stream, uplink: Uplink, number: int) -> None:
        """From now on a stream goes through this relay."""
        stream.uplink, stream.number = uplink, number
        self._through.setdefault(uplink, {})[number] = stream

    def _leave(self, stream: Stream, told: bool = False) -> None:
        """A stream goes through its relay no more; told: the other end is to hear of it."""
        uplink, stream.uplink = stream.uplink, None
        if uplink is not None and self._through.get(uplink, {}).pop(stream.number, None) is not None and told:
            self._uplinks.say(uplink, Frame(CLOSE, stream.number))

    def _end(self, stream: Stream) -> None:
        self._leave(stream, told=True)
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self.all.discard(stream)
        stream.local.close()


def _connected(at: str) -> socket.socket:
    """A connection to this node's own listening socket. Raises OSError."""
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
