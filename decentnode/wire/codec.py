"""Encodes messages to bytes and decodes them. Decoding trusts no input: it checks every length and range before use."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import msgpack

from decentnode.errors import PeerFault
from decentnode.wire.bounds import MAX_FIGURES, FieldCheck, Scalars, check_of, check_scalars
from decentnode.wire.messages import FIELDS, MESSAGES, PROTOCOL_VERSION, Message

Bytes = bytes | bytearray | memoryview

MAGIC = 0xDC
MAX_HEADER_BYTES = 256 * 1024

_RULES: dict[type[Message], tuple[tuple[int, int, FieldCheck], ...]] = {
    kind: tuple(
        (each.metadata.get("limit", 0), each.metadata["blob"] if each.metadata.get("exact") else -1,
         check_of(each.metadata))
        for each in fields
    )
    for kind, fields in FIELDS.items()
}  # fmt: skip
"""For each field: its upper limit (0 if it is no integer), its exact number of bytes (-1 if it has no fixed size), and
its check. `_first_problem` compares limit and size itself and calls the check only if they do not fit: every message of
a round passes through it, and one call for each field would be most of its cost."""
_NAMES = {kind: tuple(each.name for each in fields) for kind, fields in FIELDS.items()}
_VALUES = {kind: attrgetter(*(each.name for each in fields)) for kind, fields in FIELDS.items()}


def encode(message: Message) -> bytes:
    """Returns the header of a message. Raises ValueError if a field is out of bounds, a bug in our own code."""
    kind = type(message)
    return encode_values(kind, _VALUES[kind](message))


def encode_values(kind: type[Message], values: tuple[Any, ...]) -> bytes:
    """Returns the header of a message of this kind with these values, in the order of its fields.

    It is the header that `encode` returns, without the cost of creating the message. Raises ValueError like `encode`.
    """
    wrong = _first_problem(kind, values)
    if wrong:
        raise ValueError(f"{kind.__name__}.{wrong[0]} {wrong[1]}, got {wrong[2]!r:.80}")
    packed: bytes = _packer().pack((MAGIC, PROTOCOL_VERSION, kind.TYPE, *values))
    return packed


def _packer() -> msgpack.Packer:
    """Returns the packer of this thread. It is reused because creating one costs more than packing a header."""
    found = getattr(_thread_local, "packer", None)
    if found is None:
        found = _thread_local.packer = msgpack.Packer(default=dict, use_bin_type=True)
    return found


_thread_local = threading.local()


def decode(header: Bytes) -> Message:
    """Returns the message of a header. Raises PeerFault, and nothing else, for bytes that are not a valid header."""
    if len(header) > MAX_HEADER_BYTES:
        raise PeerFault("oversized_header", f"{len(header)} bytes")
    parts = _unpack(header)
    if type(parts) is not list or len(parts) < 3 or parts[0] != MAGIC or type(parts[0]) is not int:
        raise PeerFault("malformed_header", "not a decentnode message")
    if type(parts[1]) is not int or parts[1] != PROTOCOL_VERSION:
        raise PeerFault("protocol_version", f"{parts[1]!r:.20}, not {PROTOCOL_VERSION}")
    kind = MESSAGES.get(parts[2]) if type(parts[2]) is int else None
    if kind is None:
        raise PeerFault("unknown_type", f"{parts[2]!r:.20}")
    values = parts[3:]
    if len(values) != len(_RULES[kind]):
        raise PeerFault("malformed_header", f"{kind.__name__} has {len(values)} fields, not {len(_RULES[kind])}")
    wrong = _first_problem(kind, values)
    if wrong:
        raise PeerFault("malformed_header", f"{kind.__name__}.{wrong[0]} {wrong[1]}")
    message = object.__new__(kind)  # same result as the frozen dataclass's constructor, in half the time
    message.__dict__.update(zip(_NAMES[kind], values, strict=True))
    return message


def decode_scalars(raw: Bytes) -> Scalars:
    """Returns the named scalars of a msgpack map. Raises PeerFault for bytes that are not such a map."""
    found = _unpack(raw)
    problem = check_scalars(found)
    if problem:
        raise PeerFault("malformed_header", f"scalars {problem}")
    return cast(Scalars, found)


def _unpack(raw: Bytes) -> object:
    """Returns the msgpack value of these bytes. Raises PeerFault unless they are exactly one value within bounds."""
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=16384,
            max_bin_len=MAX_HEADER_BYTES,
            max_array_len=64,
            max_map_len=MAX_FIGURES,
            max_ext_len=0,
        )
    except Exception as error:
        raise PeerFault("malformed_header", type(error).__name__) from None


def _first_problem(kind: type[Message], values: Sequence[Any]) -> tuple[str, str, Any] | None:
    """Returns (name, problem, value) of the first invalid field, or None if all are valid."""
    for place, (limit, exact_bytes, check) in enumerate(_RULES[kind]):
        value = values[place]
        if limit:
            is_valid = type(value) is int and 0 <= value < limit
        else:
            is_valid = type(value) is bytes and len(value) == exact_bytes
        problem = None if is_valid else check(value)
        if problem:
            return FIELDS[kind][place].name, problem, value
    return None


def to_bitmap(uids: Iterable[int], num_nodes: int) -> bytes:
    """Returns a set of uids as bits: bit u % 8 of byte u // 8 for uid u."""
    bits = bytearray((num_nodes + 7) // 8)
    for uid in uids:
        bits[uid >> 3] |= 1 << (uid & 7)
    return bytes(bits)


def from_bitmap(bits: bytes, num_nodes: int) -> set[int]:
    """Returns the uids of a bitmap. Raises PeerFault when a bit at or above num_nodes is set."""
    found = {8 * i + k for i, byte in enumerate(bits) if byte for k in range(8) if byte >> k & 1}
    if found and max(found) >= num_nodes:
        raise PeerFault("unknown_uid", f"{max(found)}")
    return found
