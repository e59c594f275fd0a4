"""Doorbells between nodes of one host: datagrams that carry a `Slot` message in a fixed binary layout.

A doorbell begins with 54 bytes: magic, version, two zeros, run (8), generation (u32), its origin (12), source (u32),
round (u64), use (u64), number of tensors (u16), bytes of scalars (u16), phase (u8), slot (u8). Then come the number of
elements of each tensor (u64) and the scalars (a msgpack map, or nothing). All of it is little-endian.

A node sends one to every neighbor in every round, and encoding a message with named and checked fields would cost
several times as much. If the datagram socket does not accept a doorbell, it is sent as a `Slot` over ZeroMQ.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack

from decentnode.errors import PeerFault
from decentnode.wire import codec
from decentnode.wire.bounds import Scalars
from decentnode.wire.generation import Name
from decentnode.wire.messages import MAX_ROUND, PROTOCOL_VERSION, Slot

MAX_BYTES = 4096
"""Largest doorbell that is sent as a datagram, in bytes."""
MAGIC = 0xDB

_GENERATION = struct.Struct("<BBxx8sI12s")
_DOORBELL = struct.Struct(f"<{_GENERATION.size}sIQQHHBB")

OpenedDoorbell = tuple[int, int, int, int, int, bytes, Scalars]
"""(source, round, phase, slot, use, totals (8 bytes per tensor), scalars) of a doorbell."""


class Doorbells:
    """Encodes and decodes the doorbells of one node, in one generation of one run."""

    def __init__(self, uid: int, run: bytes, generation: Name, refuse: Callable[[Slot], object]) -> None:
        """refuse: called with a doorbell of another run or generation; it raises the PeerFault that says so."""
        self._uid, self._prefix = uid, _GENERATION.pack(MAGIC, PROTOCOL_VERSION, run, *generation)
        self._refuse = refuse

    def make(self, round: int, phase: int, slot: int, use: int, totals: bytes, scalars: Scalars) -> bytes:
        """Returns a doorbell as bytes. totals: number of elements of each tensor, 8 bytes little-endian each."""
        rest = msgpack.packb(dict(scalars)) if scalars else b""
        fixed = _DOORBELL.pack(self._prefix, self._uid, round, use, len(totals) >> 3, len(rest), phase, slot)
        return b"".join((fixed, totals, rest))

    def open(self, datagram: bytes) -> OpenedDoorbell:
        """Returns the fields of a doorbell. Raises PeerFault unless it is one of this run and generation."""
        if len(datagram) < _DOORBELL.size:
            raise PeerFault("malformed_header", f"a doorbell of {len(datagram)} bytes")
        prefix, source, round, use, tensors, of_scalars, phase, slot = _DOORBELL.unpack_from(datagram)
        end = _DOORBELL.size + 8 * tensors
        if len(datagram) != end + of_scalars or round >= MAX_ROUND or slot > 1 or use >> 62:
            raise PeerFault("malformed_header", f"a doorbell of {len(datagram)} bytes")
        if prefix != self._prefix:
            self._raise_refusal(prefix, source)
        scalars = codec.decode_scalars(datagram[end:]) if of_scalars else {}
        return source, round, phase, slot, use, datagram[_DOORBELL.size : end], scalars

    def _raise_refusal(self, prefix: bytes, source: int) -> None:
        """Raises PeerFault for a prefix that is not a doorbell's, or is that of another run or generation."""
        magic, version, run, generation, origin = _GENERATION.unpack(prefix)
        if magic != MAGIC:
            raise PeerFault("malformed_header", "not a doorbell")
        if version != PROTOCOL_VERSION:
            raise PeerFault("protocol_version", f"{version}, not {PROTOCOL_VERSION}")
        self._refuse(Slot(run, generation, source, 0, 0, 0, 0, b"", {}, origin=origin))
        raise PeerFault("malformed_header", "not a doorbell")
