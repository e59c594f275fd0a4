"""Relays: how bytes reach a node to which nobody can connect, because a router translates its address.

Such a node keeps a connection to a member that others reach, its *relay*, and offers itself there. Who wants to send to
it opens a *stream* through the relay, which stands for one connection between the two; what goes through it is what
would go through the connection. With keys that is CURVE between the two ends: the relay sees who speaks with whom, when
and how much, and can hold bytes back or cut them off, but it can neither read nor change anything unnoticed. Without
keys it can do both, as everybody on the network path can.

`RelayHub` is the relay's side: frames in, frames out. Both ends are in communication/zeromq/relays/relayed_streams.py.
Nothing waits in a hub: what may be under way on a stream is bounded by the credit that its receiver gives
(STREAM_BYTES), and the number of streams by MAX_STREAMS.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from decentnode.errors import PeerFault

RELAY_VERSION = 1
ROUTE = b"relay "
"""How the routing ids begin of connections to a relay."""
HELLO, PING, OPEN, OPENED, DATA, CREDIT, CLOSE, RESET = range(1, 9)
"""Kinds of frames. HELLO: an end begins (plane 1: offers itself), and the relay answers with number 1 once it knows who
that is; PING is sent back; OPEN asks for a stream to the identity in the body, whose end answers OPENED or CLOSE;
CREDIT: so many more bytes may come; RESET: the relay knows nothing of this connection."""
PIECE_BYTES = 1 << 16
"""Most bytes of a stream in one frame."""
STREAM_BYTES = 8 * PIECE_BYTES
"""What may be under way on a stream, in each direction."""
MAX_STREAMS = 120
"""Of one end: all that is under way to it then finds room in its connection (RELAY_MESSAGES)."""
RELAY_MESSAGES = 1200
"""Frames that wait at a relay for one end, in ZeroMQ's queue."""
MAX_ENDS = 512
MAX_IDENTITY_BYTES = 40
SILENT_SECONDS = 10.0
"""An end of which nothing came for so long is forgotten; ends send a PING every second."""
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
        """Returns it as bytes."""
        return b"".join((_HEAD.pack(self.kind, self.plane, self.stream, self.number), self.body))

    @classmethod
    def decoded(cls, raw: memoryview) -> Frame:
        """Returns the frame of these bytes; the body is part of them. Raises PeerFault."""
        if len(raw) < _HEAD.size or len(raw) > _HEAD.size + PIECE_BYTES:
            raise PeerFault("malformed_header", f"relay frame of {len(raw)} bytes")
        kind, plane, stream, number = _HEAD.unpack_from(raw)
        if not HELLO <= kind <= RESET or plane > 1 or (kind not in (DATA, OPEN, HELLO) and len(raw) > _HEAD.size):
            raise PeerFault("malformed_header", f"relay frame {kind}, plane {plane}")
        return cls(kind, stream, plane, number, raw[_HEAD.size :])


@dataclass
class _End:
    """A connection to this relay."""

    identity: bytes
    heard: float
    streams: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Stream here -> (route of the other end, stream there)."""
    next_stream: int = 1
    """Odd: those that ends open themselves are even."""


class RelayHub:
    """The streams through one relay. Not thread-safe; what is to be sent gathers in `outbox`. now: seconds of any
    monotonic clock."""

    def __init__(self, known: Callable[[bytes], bool]) -> None:
        """known(identity): whether a node of this run has it: its public key, or where nodes have none, its uid."""
        self.outbox: list[tuple[bytes, Frame]] = []
        """(route, frame)."""
        self.relayed_bytes = 0
        """Of streams, passed on so far."""
        self._known = known
        self._ends: dict[bytes, _End] = {}
        self._offered: dict[bytes, bytes] = {}
        """Identity -> route of a node that can be reached here."""
        self._next_look = 0.0

    def busy(self, own: bytes) -> bool:
        """Whether streams go through here that do not end at the identity `own`."""
        mine = {route for route, end in self._ends.items() if end.identity == own}
        return any(other not in mine for route, end in self._ends.items() if route not in mine
                   for other, _ in end.streams.values())  # fmt: skip

    def serves(self, own: bytes) -> bool:
        """Whether streams go through here that end at the identity `own`."""
        return any(end.streams for end in self._ends.values() if end.identity == own)

    def take(self, route: bytes, proven: bytes, raw: memoryview, now: float) -> None:
        """A frame that came. proven: the identity of the connection, empty where connections prove none. Raises
        PeerFault for one that no end sends."""
        self._forget_silent(now)
        frame = Frame.decoded(raw)
        if frame.kind == HELLO:
            self._on_hello(route, proven or bytes(frame.body), frame, now)
            return
        end = self._ends.get(route)
        if end is None:
            self._say(route, Frame(RESET))
            return
        end.heard = now
        if frame.kind == PING:
            self._say(route, Frame(PING))
        elif frame.kind == OPEN:
            self._on_open(route, end, frame)
        elif frame.kind in (OPENED, DATA, CREDIT, CLOSE):
            self._pass_on(end, frame)
        else:
            raise PeerFault("malformed_header", f"relay frame {frame.kind} from an end")

    def lost(self, route: bytes) -> None:
        """An end takes nothing any more: its streams are over."""
        end = self._ends.pop(route, None)
        if end is None:
            return
        if self._offered.get(end.identity) == route:
            del self._offered[end.identity]
        for other, there in end.streams.values():
            self._close(other, there)

    def _on_hello(self, route: bytes, identity: bytes, frame: Frame, now: float) -> None:
        if frame.number != RELAY_VERSION or not 0 < len(identity) <= MAX_IDENTITY_BYTES:
            raise PeerFault("protocol_version", f"relay protocol {frame.number}, not {RELAY_VERSION}")
        known = self._known(identity) and (route in self._ends or len(self._ends) < MAX_ENDS)
        if known:
            self._ends.setdefault(route, _End(identity, now)).heard = now
            if frame.plane:
                self._offered[identity] = route  # the newest: who comes again has lost the connection before
        self._say(route, Frame(HELLO, number=int(known)))

    def _on_open(self, route: bytes, end: _End, frame: Frame) -> None:
        """Refused by a CLOSE where the target is not here, or too many streams are."""
        to = self._offered.get(bytes(frame.body), b"")
        target = self._ends.get(to)
        wrong = frame.stream % 2 or not frame.stream or frame.stream in end.streams
        if wrong or target is None or max(len(end.streams), len(target.streams)) >= MAX_STREAMS:
            self._say(route, Frame(CLOSE, frame.stream))
            return
        there, target.next_stream = target.next_stream, target.next_stream + 2
        end.streams[frame.stream], target.streams[there] = (to, there), (route, frame.stream)
        self._say(to, Frame(OPEN, there, frame.plane))

    def _pass_on(self, end: _End, frame: Frame) -> None:
        """A frame of a stream that is over is dropped: its sender has been told, or will be."""
        other = end.streams.get(frame.stream)
        if other is None:
            return
        self._say(other[0], Frame(frame.kind, other[1], frame.plane, frame.number, frame.body))
        if frame.kind == DATA:
            self.relayed_bytes += len(frame.body)
        elif frame.kind == CLOSE:
            del end.streams[frame.stream]
            self._forget(*other)

    def _forget(self, route: bytes, stream: int) -> None:
        if route in self._ends:
            self._ends[route].streams.pop(stream, None)

    def _close(self, route: bytes, stream: int) -> None:
        self._forget(route, stream)
        if route in self._ends:
            self._say(route, Frame(CLOSE, stream))

    def _say(self, route: bytes, frame: Frame) -> None:
        self.outbox.append((route, frame))

    def _forget_silent(self, now: float) -> None:
        if now >= self._next_look:
            self._next_look = now + 1.0
            for route in [route for route, end in self._ends.items() if now - end.heard > SILENT_SECONDS]:
                self.lost(route)


def order(target: int, candidates: list[int]) -> list[int]:
    """Returns the candidates in the order in which node `target` offers itself to them, and others look for it there:
    each node begins with another."""
    first = target % len(candidates) if candidates else 0
    return candidates[first:] + candidates[:first]
