from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire import codec
from decentnode.wire.bounds import MAX_FIGURES
from decentnode.wire.messages import FIELDS, MESSAGES, Ack, Chunk, Message, Report, Slot, Stop, Welcome
from tests.conftest import scale


def field_values(rule: Any) -> st.SearchStrategy[Any]:
    if "limit" in rule:
        return st.integers(0, rule["limit"] - 1)
    if "text" in rule:
        return st.text(max_size=min(rule["text"], 40))
    if "blob" in rule:
        return st.binary(min_size=rule["blob"] if rule["exact"] else 0, max_size=min(rule["blob"], 64))
    scalar = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
    return st.dictionaries(st.text(max_size=20), scalar, max_size=5)


def messages() -> st.SearchStrategy[Message]:
    return st.one_of(
        [
            st.builds(kind, **{each.name: field_values(each.metadata) for each in FIELDS[kind]})
            for kind in MESSAGES.values()
        ]
    )


@given(messages())
@settings(max_examples=400, deadline=None)
def test_round_trip(message: Message) -> None:
    assert codec.decode(codec.encode(message)) == message


GOLDEN = [
    (Welcome(b"12345678", 0, 3), f"97cc dc 0e 02 c4083132333435363738 00 03 c40c{'00' * 12}"),
    (Stop(b"12345678", 2, 300, origin=b"who and then"),
     "97cc dc 0e 0c c4083132333435363738 02 cd012c c40c77686f20616e64207468656e"),
    (Chunk(b"12345678", 1, 5, 7, 0, 0, 2, 300000, {"k": 2}),
     f"9dcc dc 0e 08 c4083132333435363738 01 05 c40c{'00' * 12} 07 00 00 02 ce000493e0 81a16b02"),
    (Ack(b"12345678", 0, 4, 1, 17, b"\x05", 0, 3),
     f"9ccc dc 0e 11 c4083132333435363738 00 04 c40c{'00' * 12} 01 11 c40105 00 03"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "golden"), GOLDEN)
def test_golden_bytes(message: Message, golden: str) -> None:
    """The header of protocol version 14: a change here needs a new version."""
    assert codec.encode(message) == bytes.fromhex(golden.replace(" ", ""))


def test_types_are_numbered_once() -> None:
    assert sorted(MESSAGES) == list(range(1, len(MESSAGES) + 1))


@given(st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_a_message_or_a_fault(data: bytes) -> None:
    try:
        codec.decode(data)
    except PeerFault as fault:
        assert fault.reason in {"malformed_header", "protocol_version", "unknown_type"}


def test_mutated_headers_are_messages_or_faults() -> None:
    draw = random.Random(1)
    headers = [codec.encode(message) for message, _ in GOLDEN]
    for _ in range(scale(5000, 100_000)):
        data = bytearray(draw.choice(headers))
        for _ in range(draw.randint(1, 4)):
            where = draw.randrange(len(data))
            data[where : where + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 3))
            data = data or bytearray(b"\0")
        try:
            codec.decode(bytes(data))
        except PeerFault:
            continue


RUN, ORIGIN = b"12345678", bytes(12)


@pytest.mark.parametrize(
    "value",
    [
        {1: 2}, [], [220], [220, 6], [True, 6, 2, RUN, 0, 3, ORIGIN], [220, True, 2, RUN, 0, 3, ORIGIN],
        [220, 14, 2, RUN[1:], 0, 3, ORIGIN], [220, 14, 2, RUN, True, 3, ORIGIN], [220, 14, 2, RUN, -1, 3, ORIGIN],
        [220, 14, 2, RUN, 0, 1 << 40, ORIGIN], [220, 14, 2, "12345678", 0, 3, ORIGIN],
        [220, 14, 2, RUN, 0, 3, ORIGIN, 4], [220, 14, 2, RUN, 0, 3],
        [220, 14, 2, RUN, 0, 3, ORIGIN[1:]], [220, 14, 2, RUN, 0, 3, 0],
        [220, 14, 2, RUN, 0.0, 3, ORIGIN], [220, 14, 99, RUN, 0, 3, ORIGIN], [220, 15, 2, RUN, 0, 3, ORIGIN],
        [220, 14, 15, RUN, 0, 3, ORIGIN, 1, {"k": [1]}], [220, 14, 15, RUN, 0, 3, ORIGIN, 1, {"k": True}],
        [220, 14, 15, RUN, 0, 3, ORIGIN, 1, {str(i): i for i in range(MAX_FIGURES + 1)}],
        [220, 14, 16, RUN, 0, 3, ORIGIN, 1, 0, 0, 0, b"", {str(i): i for i in range(65)}],
        [220, 14, 15, RUN, 0, 3, ORIGIN, 1, {"k": "x" * 300}], msgpack.ExtType(1, b"x"),
        [220, 14, 2, RUN, 0, [[[[[[]]]]]], ORIGIN],
    ],
)  # fmt: skip
def test_wrong_values_are_faults(value: object) -> None:
    with pytest.raises(PeerFault):
        codec.decode(msgpack.packb(value))


def test_the_wrong_values_are_wrong_in_one_place() -> None:
    assert codec.decode(msgpack.packb([220, 14, 2, RUN, 0, 3, ORIGIN])) == Welcome(RUN, 0, 3)
    assert codec.decode(msgpack.packb([220, 14, 15, RUN, 0, 3, ORIGIN, 1, {"k": 1}])) == Report(RUN, 0, 3, 1, {"k": 1})
    slot = Slot(RUN, 0, 3, 1, 0, 0, 0, b"", {"k": 1})
    assert codec.decode(msgpack.packb([220, 14, 16, RUN, 0, 3, ORIGIN, 1, 0, 0, 0, b"", {"k": 1}])) == slot


def test_as_many_figures_as_a_node_may_have_fit_into_a_report() -> None:
    """A translation with moving averages and training samples has 66."""
    figures = {f"{i:064d}": i / 7 for i in range(MAX_FIGURES)}
    report = Report(RUN, 0, 3, 1, figures)
    assert codec.decode(codec.encode(report)) == report


def test_huge_counts_allocate_nothing() -> None:
    for bomb in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(PeerFault, match="malformed_header"):
            codec.decode(bomb + b"x" * 10)
    with pytest.raises(PeerFault, match="malformed_header"):
        codec.decode(b"\x91" * 100_000)
    with pytest.raises(PeerFault, match="oversized_header"):
        codec.decode(bytes(codec.MAX_HEADER_BYTES + 1))


def test_own_messages_are_checked_too() -> None:
    with pytest.raises(ValueError, match="source must be in"):
        codec.encode(Welcome(b"12345678", 0, -1))


@given(st.sets(st.integers(0, 99)))
def test_bitmaps(uids: set[int]) -> None:
    assert codec.from_bitmap(codec.to_bitmap(uids, 100), 100) == uids
    if uids and max(uids) >= 50:
        with pytest.raises(PeerFault, match="unknown_uid"):
            codec.from_bitmap(codec.to_bitmap(uids, 100), 50)
