"""The prefix of every message on a socket: its sequence number, and how its bytes are protected.

20 bytes: sequence (u64, 0: not numbered), kind (u16), header bytes (u16), sum (u64), little-endian. Where the header's
size is given, the body follows it in the same frame; where it is 0, the header is the rest of the frame, and the body,
if any, is the next frame. A sum covers sequence, kind, the size as it is given, the header with its length, and the
body: also where a header ends, and whether there is a sum. Without one, it is 0. With AES-GCM the body carries its own
tag: the sequence is the nonce, sequence and header are the associated data, and the sum is 0.
"""

from __future__ import annotations

import struct
import zlib

import xxhash

from decentnode.errors import PeerFault

Bytes = bytes | bytearray | memoryview

PREFIX = struct.Struct("<QHHQ")
NONE, CRC32, XXH3, AES_GCM = 0, 1, 2, 3
KINDS = {"none": NONE, "crc32": CRC32, "xxh3": XXH3}
MAX_SEQUENCE = 1 << 62
MAX_JOINED_HEADER = (1 << 16) - 1
"""Most bytes of a header that a body can follow in the same frame."""

_NUMBERS = struct.Struct("<QQHHI")
"""The first bytes that a sum covers: sequence, the body's sum, kind, header bytes as the prefix gives them, and the
header's real size."""


def body_sum(kind: int, body: Bytes) -> int:
    """Returns the body's part of a sum: the same for every receiver, so that it is computed once per body."""
    if kind == XXH3:
        return xxhash.xxh3_64_intdigest(body)
    return zlib.crc32(body) if kind == CRC32 else 0


def sealed(sequence: int, header: bytes, kind: int, of_body: int, body: Bytes | None = None) -> bytes:
    """Returns the first frame of a message: prefix, header, and `body`, unless that goes into a frame of its own."""
    if body is None:
        return PREFIX.pack(sequence, kind, 0, _sum(kind, sequence, 0, header, of_body)) + header
    size = len(header)
    return b"".join((PREFIX.pack(sequence, kind, size, _sum(kind, sequence, size, header, of_body)), header, body))


def opened(frame: memoryview) -> tuple[int, int, int, bytes, memoryview | None]:
    """Returns (sequence, kind, sum, header, body) of a first frame; body: None where the frame has none.

    Raises PeerFault when there is no prefix, or when the header is shorter than the prefix says.
    """
    size = len(frame)
    if size < PREFIX.size:
        raise PeerFault("malformed_header", f"{size} bytes")
    sequence, kind, header_bytes, sum_ = PREFIX.unpack_from(frame)
    if kind > AES_GCM or sequence >= MAX_SEQUENCE:
        raise PeerFault("malformed_header", f"protection {kind}, sequence {sequence}")
    if not header_bytes:
        return sequence, kind, sum_, bytes(frame[PREFIX.size :]), None
    end = PREFIX.size + header_bytes
    if end > size:
        raise PeerFault("malformed_header", f"{header_bytes} bytes of header in {size} bytes")
    return sequence, kind, sum_, bytes(frame[PREFIX.size : end]), frame[end:]


def verify(sequence: int, kind: int, sum_: int, header: bytes, body: Bytes, joined: bool) -> None:
    """Raises PeerFault when a message is not what was sent, or has a sum though its kind is NONE.

    joined: whether the body came in the first frame.
    """
    if sum_ != _sum(kind, sequence, len(header) if joined else 0, header, body_sum(kind, body)):
        raise PeerFault("checksum_mismatch", f"{len(header)} + {memoryview(body).nbytes} bytes")


def _sum(kind: int, sequence: int, given: int, header: bytes, of_body: int) -> int:
    if kind == XXH3:
        return xxhash.xxh3_64_intdigest(_NUMBERS.pack(sequence, of_body, kind, given, len(header)) + header)
    if kind == CRC32:
        return zlib.crc32(header, zlib.crc32(_NUMBERS.pack(sequence, of_body, kind, given, len(header))))
    return 0


def nonce(sequence: int) -> bytes:
    """Returns the 12-byte nonce of AES-GCM. A key is never used for two messages with one sequence number."""
    return sequence.to_bytes(12, "little")


def associated(sequence: int, header: bytes) -> bytes:
    """Returns the associated data of AES-GCM."""
    return sequence.to_bytes(8, "little") + header
