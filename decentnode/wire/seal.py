"""What stands before every header on a socket: its number in the stream, and how its bytes are protected.

20 bytes: sequence (u64, 0: not numbered), kind (u32), sum (u64), little-endian. A sum covers sequence, header and
body. With AES-GCM the body carries its own tag, the sequence is the nonce and sequence and header are its
associated data; the sum is 0.
"""

from __future__ import annotations

import struct
import zlib

import xxhash

from decentnode.errors import PeerFault

Bytes = bytes | bytearray | memoryview

PREFIX = struct.Struct("<QIQ")
NONE, CRC32, XXH3, AES_GCM = 0, 1, 2, 3
KINDS = {"none": NONE, "crc32": CRC32, "xxh3": XXH3}
MAX_SEQUENCE = 1 << 62


def body_sum(kind: int, body: Bytes) -> int:
    """The part of a sum that is the same for every receiver of one body."""
    if kind == CRC32:
        return zlib.crc32(body)
    return xxhash.xxh3_64_intdigest(body) if kind == XXH3 else 0


def sealed(sequence: int, header: bytes, kind: int, of_body: int) -> bytes:
    """First frame of a message: prefix and header."""
    return PREFIX.pack(sequence, kind, _sum(kind, sequence, header, of_body)) + header


def opened(frame: Bytes) -> tuple[int, int, int, bytes]:
    """(sequence, kind, sum, header) of a first frame. Raises PeerFault when there is no prefix."""
    if len(frame) < PREFIX.size:
        raise PeerFault("malformed_header", f"{len(frame)} bytes")
    sequence, kind, sum_ = PREFIX.unpack_from(frame)
    if kind > AES_GCM or sequence >= MAX_SEQUENCE:
        raise PeerFault("malformed_header", f"protection {kind}, sequence {sequence}")
    return sequence, kind, sum_, bytes(frame[PREFIX.size :])


def verify(sequence: int, kind: int, sum_: int, header: bytes, body: Bytes) -> None:
    """Raises PeerFault when sequence, header and body are not what was sent."""
    if kind in (CRC32, XXH3) and sum_ != _sum(kind, sequence, header, body_sum(kind, body)):
        raise PeerFault("checksum_mismatch", f"{len(header)} + {memoryview(body).nbytes} bytes")


def _sum(kind: int, sequence: int, header: bytes, of_body: int) -> int:
    if kind == CRC32:
        return zlib.crc32(header, zlib.crc32(struct.pack("<QQ", sequence, of_body)))
    if kind == XXH3:
        return xxhash.xxh3_64_intdigest(struct.pack("<QQ", sequence, of_body) + header)
    return 0


def nonce(sequence: int) -> bytes:
    """12 bytes; a key is never used for two messages with one number."""
    return sequence.to_bytes(12, "little")


def associated(sequence: int, header: bytes) -> bytes:
    return sequence.to_bytes(8, "little") + header
