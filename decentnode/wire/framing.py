"""The prefix of every message on a socket: its sequence number and its checksum or encryption.

The prefix has 20 bytes, little-endian: sequence number (u64, 0 if the message has none), kind of protection (u16),
header size (u16), checksum (u64). If the header size is not 0, the body follows the header in the same frame. If it is
0, the header is the rest of the frame, and the body, if there is one, is the next frame.

The checksum covers the sequence number, the kind of protection, the header size of the prefix, the header with its real
length, and the body; a message that was changed to end its header elsewhere or to have no checksum fails as well.
Without a checksum the field is 0. With AES-GCM the body carries its own tag: the sequence number is the nonce, sequence
number and header are the associated data, and the checksum is 0.
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
"""Largest header, in bytes, that a body can follow in the same frame."""

_CHECKSUM_START = struct.Struct("<QQHHI")
"""The first bytes that a checksum covers: sequence number, checksum of the body, kind of protection, header size of the
prefix, real size of the header."""


def compute_body_checksum(kind: int, body: Bytes) -> int:
    """Returns the checksum of a body. It is the same for every receiver, so that it is computed once per body."""
    if kind == XXH3:
        return xxhash.xxh3_64_intdigest(body)
    return zlib.crc32(body) if kind == CRC32 else 0


def sealed(sequence: int, header: bytes, kind: int, body_checksum: int, body: Bytes | None = None) -> bytes:
    """Returns the first frame of a message: prefix, header and `body`.

    body_checksum: what `compute_body_checksum` returns for the message's body. body: None if there is none or it gets
    a frame of its own.
    """
    if body is None:
        return PREFIX.pack(sequence, kind, 0, _checksum(kind, sequence, 0, header, body_checksum)) + header
    size = len(header)
    prefix = PREFIX.pack(sequence, kind, size, _checksum(kind, sequence, size, header, body_checksum))
    return b"".join((prefix, header, body))


def opened(frame: memoryview) -> tuple[int, int, int, bytes, memoryview | None]:
    """Returns (sequence, kind, checksum, header, body) of a first frame; body is None if the frame contains none.

    Raises PeerFault for a frame that is shorter than its prefix and header, or with an invalid prefix.
    """
    size = len(frame)
    if size < PREFIX.size:
        raise PeerFault("malformed_header", f"{size} bytes")
    sequence, kind, header_bytes, checksum = PREFIX.unpack_from(frame)
    if kind > AES_GCM or sequence >= MAX_SEQUENCE:
        raise PeerFault("malformed_header", f"protection {kind}, sequence {sequence}")
    if not header_bytes:
        return sequence, kind, checksum, bytes(frame[PREFIX.size :]), None
    end = PREFIX.size + header_bytes
    if end > size:
        raise PeerFault("malformed_header", f"{header_bytes} bytes of header in {size} bytes")
    return sequence, kind, checksum, bytes(frame[PREFIX.size : end]), frame[end:]


def verify(sequence: int, kind: int, checksum: int, header: bytes, body: Bytes, joined: bool) -> None:
    """Raises PeerFault if the checksum of a message is wrong, or is not 0 though the kind is NONE.

    joined: whether the body arrived in the first frame.
    """
    if checksum != _checksum(kind, sequence, len(header) if joined else 0, header, compute_body_checksum(kind, body)):
        raise PeerFault("checksum_mismatch", f"{len(header)} + {memoryview(body).nbytes} bytes")


def _checksum(kind: int, sequence: int, size_in_prefix: int, header: bytes, body_checksum: int) -> int:
    if kind not in (XXH3, CRC32):
        return 0
    start = _CHECKSUM_START.pack(sequence, body_checksum, kind, size_in_prefix, len(header))
    return xxhash.xxh3_64_intdigest(start + header) if kind == XXH3 else zlib.crc32(header, zlib.crc32(start))


def nonce(sequence: int) -> bytes:
    """Returns the 12-byte nonce of AES-GCM. A key must never be used for two messages with one sequence number."""
    return sequence.to_bytes(12, "little")


def associated_data(sequence: int, header: bytes) -> bytes:
    """Returns the associated data of AES-GCM: the sequence number and the header."""
    return sequence.to_bytes(8, "little") + header
