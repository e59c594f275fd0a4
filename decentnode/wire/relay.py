"""Relays, through which bytes reach a node that nobody can connect to because a router translates its address (NAT).

Such a node keeps a connection to a member that others can reach, its *relay*, and registers there. A node that wants to
send to it opens a *stream* through the relay. A stream replaces one connection between the two nodes and carries the
bytes that the connection would carry. With keys these bytes are CURVE between the two ends: the relay sees who
communicates with whom, when and how much, and can delay bytes or cut the stream, but it can neither read anything nor
change anything unnoticed. Without keys it can do both, like everybody on the network path.

`RelayHub` is the relay's side: it takes frames and returns frames. Both ends of a stream are in
communication/zeromq/relays/relayed_streams.py. A hub buffers nothing: the bytes in flight on a stream are bounded by
the credit that its receiver grants (STREAM_BYTES), and the number of streams by MAX_STREAMS.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from decentnode.errors import PeerFault

RELAY_VERSION = 1
ROUTE_PREFIX = b"relay "
"""Prefix of the ZeroMQ routing ids of connections to a relay."""
HELLO, PING, OPEN, OPENED, DATA, CREDIT, CLOSE, RESET = range(1, 9)
"""Kinds of frames. HELLO: a node begins to use the relay (plane 1: it also registers as reachable here), and the relay
answers with number 1 if it knows the node. PING is sent back. OPEN asks for a stream to the identity in the body, which
answers with OPENED or CLOSE. CREDIT: `number` more bytes may be sent. RESET: the relay does not know this
connection."""
PIECE_BYTES = 1 << 16
"""Most bytes of a stream in one frame."""
STREAM_BYTES = 8 * PIECE_BYTES
"""Most bytes in flight on a stream, in each direction."""
MAX_STREAMS = 120
"""Most streams of one connection: everything in flight on it then fits into its queue (RELAY_MESSAGES)."""
RELAY_MESSAGES = 1200
"""Most frames that wait at a relay for one connection, in ZeroMQ's queue."""
MAX_ENDS = 512
MAX_IDENTITY_BYTES = 40
SILENT_SECONDS = 10.0
"""A relay forgets a node that was silent for this long; nodes send a PING every second."""
_HEAD = struct.Struct("<BBII")


@dataclass(frozen=True)
class Frame:
    """One frame of a connection to a relay."""

    kind: int
    stream: int = 0
    plane: int = 0
    number: int = 0
    body: bytes | memoryview = b""

    def encoded(self) -> bytes:
        """Returns the frame as bytes."""
        return b"".join((_HEAD.pack(self.kind, self.plane, self.stream, self.number), self.body))

    @classmethod
    def decoded(cls, raw: memoryview) -> Frame:
        """Returns the frame of these bytes; its body is a view of them. Raises PeerFault for an invalid frame."""
        if len(raw) < _HEAD.size or len(raw) > _HEAD.size + PIECE_BYTES:
            raise PeerFault("malformed_header", f"relay frame of {len(raw)} bytes")
        kind, plane, stream, number = _HEAD.unpack_from(raw)
        if not HELLO <= kind <= RESET or plane > 1 or (kind not in (DATA, OPEN, HELLO) and len(raw) > _HEAD.size):
            raise PeerFault("malformed_header", f"relay frame {kind}, plane {plane}")
        return cls(kind, stream, plane, number, raw[_HEAD.size :])


@dataclass
class _Connection:
    """A node's connection to this relay."""

    identity: bytes
    heard: float
    streams: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Stream number on this connection -> (route of the other end, stream number on the other end's connection)."""
    next_stream: int = 1
    """The next stream number that the relay gives: odd, because nodes give even numbers to the streams they open."""


class RelayHub:
    """The streams through one relay. Not thread-safe; the owner sends the frames in `outbox`. now: seconds of any
    monotonic clock."""

    def __init__(self, known: Callable[[bytes], bool]) -> None:
        """known(identity): whether a node of this run has this identity: its public key, or its uid if nodes have no
        keys."""
        self.outbox: list[tuple[bytes, Frame]] = []
        """(route, frame) pairs to send."""
        self.relayed_bytes = 0
        """Bytes of streams that were forwarded so far."""
        self._known = known
        self._connections: dict[bytes, _Connection] = {}
        self._registered: dict[bytes, bytes] = {}
        """Identity -> route of each node that can be reached through this relay."""
        self._next_check = 0.0

    def forwards_for_others(self, own: bytes) -> bool:
        """Returns whether this relay has streams with no end at the identity `own`."""
        mine = {route for route, connection in self._connections.items() if connection.identity == own}
        return any(other not in mine for route, connection in self._connections.items() if route not in mine
                   for other, _ in connection.streams.values())  # fmt: skip

    def has_streams_of(self, own: bytes) -> bool:
        """Returns whether this relay has streams with an end at the identity `own`."""
        return any(connection.streams for connection in self._connections.values() if connection.identity == own)

    def take(self, route: bytes, proven: bytes, raw: memoryview, now: float) -> None:
        """Handles a received frame. Raises PeerFault for a frame that a node may not send.

        proven: the identity that the connection proved; empty if connections prove none.
        """
        self._forget_silent(now)
        frame = Frame.decoded(raw)
        if frame.kind == HELLO:
            self._on_hello(route, proven or bytes(frame.body), frame, now)
            return
        connection = self._connections.get(route)
        if connection is None:
            self._send(route, Frame(RESET))
            return
        connection.heard = now
        if frame.kind == PING:
            self._send(route, Frame(PING))
        elif frame.kind == OPEN:
            self._on_open(route, connection, frame)
        elif frame.kind in (OPENED, DATA, CREDIT, CLOSE):
            self._pass_on(connection, frame)
        else:
            raise PeerFault("malformed_header", f"relay frame {frame.kind} from an end")

    def disconnect(self, route: bytes) -> None:
        """Forgets a node whose connection accepts nothing any more, and closes its streams."""
        connection = self._connections.pop(route, None)
        if connection is None:
            return
        if self._registered.get(connection.identity) == route:
            del self._registered[connection.identity]
        for other, other_stream in connection.streams.values():
            self._close(other, other_stream)

    def _on_hello(self, route: bytes, identity: bytes, frame: Frame, now: float) -> None:
        if frame.number != RELAY_VERSION or not 0 < len(identity) <= MAX_IDENTITY_BYTES:
            raise PeerFault("protocol_version", f"relay protocol {frame.number}, not {RELAY_VERSION}")
        known = self._known(identity) and (route in self._connections or len(self._connections) < MAX_ENDS)
        if known:
            self._connections.setdefault(route, _Connection(identity, now)).heard = now
            if frame.plane:
                self._registered[identity] = route  # a node that comes again has lost its previous connection
        self._send(route, Frame(HELLO, number=int(known)))

    def _on_open(self, route: bytes, connection: _Connection, frame: Frame) -> None:
        """Opens a stream, or answers with CLOSE if the target is not registered here or has too many streams."""
        to = self._registered.get(bytes(frame.body), b"")
        target = self._connections.get(to)
        wrong = frame.stream % 2 or not frame.stream or frame.stream in connection.streams
        if wrong or target is None or max(len(connection.streams), len(target.streams)) >= MAX_STREAMS:
            self._send(route, Frame(CLOSE, frame.stream))
            return
        other_stream, target.next_stream = target.next_stream, target.next_stream + 2
        connection.streams[frame.stream], target.streams[other_stream] = (to, other_stream), (route, frame.stream)
        self._send(to, Frame(OPEN, other_stream, frame.plane))

    def _pass_on(self, connection: _Connection, frame: Frame) -> None:
        """Forwards a frame of a stream to its other end. A frame of a closed stream is dropped, because its sender was
        or will be informed by a CLOSE."""
        other = connection.streams.get(frame.stream)
        if other is None:
            return
        self._send(other[0], Frame(frame.kind, other[1], frame.plane, frame.number, frame.body))
        if frame.kind == DATA:
            self.relayed_bytes += len(frame.body)
        elif frame.kind == CLOSE:
            del connection.streams[frame.stream]
            self._forget(*other)

    def _forget(self, route: bytes, stream: int) -> None:
        if route in self._connections:
            self._connections[route].streams.pop(stream, None)

    def _close(self, route: bytes, stream: int) -> None:
        self._forget(route, stream)
        if route in self._connections:
            self._send(route, Frame(CLOSE, stream))

    def _send(self, route: bytes, frame: Frame) -> None:
        self.outbox.append((route, frame))

    def _forget_silent(self, now: float) -> None:
        if now >= self._next_check:
            self._next_check = now + 1.0
            heard = {route: connection.heard for route, connection in self._connections.items()}
            for route in [route for route, when in heard.items() if now - when > SILENT_SECONDS]:
                self.disconnect(route)


def relay_order(target: int, candidates: list[int]) -> list[int]:
    """Returns the candidate relays in the order in which the node `target` registers with them and others look for it.

    The order depends on the target, so that nodes spread over the relays.
    """
    first = target % len(candidates) if candidates else 0
    return candidates[first:] + candidates[:first]
