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
    """Returns the values that a message's field with this metadata may have."""
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
            st.builds(kind, **{field.name: field_values(field.metadata) for field in FIELDS[kind]})
            for kind in MESSAGES.values()
        ]
    )


@given(messages())
@settings(max_examples=400, deadline=None)
def test_a_decoded_message_equals_the_encoded_one(message: Message) -> None:
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
def test_headers_have_the_bytes_of_this_protocol_version(message: Message, golden: str) -> None:
    """The header of protocol version 14: a change here needs a new version."""
    assert codec.encode(message) == bytes.fromhex(golden.replace(" ", ""))


def test_message_types_are_numbered_consecutively_from_one() -> None:
    assert sorted(MESSAGES) == list(range(1, len(MESSAGES) + 1))


@given(st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_arbitrary_bytes_decode_or_raise_a_peer_fault(data: bytes) -> None:
    try:
        codec.decode(data)
    except PeerFault as fault:
        assert fault.reason in {"malformed_header", "protocol_version", "unknown_type"}


def test_mutated_headers_decode_or_raise_a_peer_fault() -> None:
    draw = random.Random(1)
    headers = [codec.encode(message) for message, _ in GOLDEN]
    num_decoded = num_refused = 0
    for _ in range(scale(5000, 100_000)):
        data = bytearray(draw.choice(headers))
        for _ in range(draw.randint(1, 4)):
            start = draw.randrange(len(data))
            data[start : start + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 3))
            data = data or bytearray(b"\0")
        try:
            message = codec.decode(bytes(data))
        except PeerFault as fault:
            assert fault.reason in {"malformed_header", "protocol_version", "unknown_type"}
            num_refused += 1
        else:
            assert codec.decode(codec.encode(message)) == message
            num_decoded += 1
    assert num_decoded and num_refused


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
def test_a_header_with_one_wrong_value_raises_a_peer_fault(value: object) -> None:
    with pytest.raises(PeerFault):
        codec.decode(msgpack.packb(value))


def test_the_headers_that_the_wrong_values_were_made_from_decode() -> None:
    """Each case of the test above differs from one of these in one place, so that it fails for that place alone."""
    assert codec.decode(msgpack.packb([220, 14, 2, RUN, 0, 3, ORIGIN])) == Welcome(RUN, 0, 3)
    assert codec.decode(msgpack.packb([220, 14, 15, RUN, 0, 3, ORIGIN, 1, {"k": 1}])) == Report(RUN, 0, 3, 1, {"k": 1})
    slot = Slot(RUN, 0, 3, 1, 0, 0, 0, b"", {"k": 1})
    assert codec.decode(msgpack.packb([220, 14, 16, RUN, 0, 3, ORIGIN, 1, 0, 0, 0, b"", {"k": 1}])) == slot


def test_the_most_figures_that_a_node_may_have_fit_into_a_report() -> None:
    """A node that trains translation with moving averages and shows training samples has 66."""
    figures = {f"{i:064d}": i / 7 for i in range(MAX_FIGURES)}
    report = Report(RUN, 0, 3, 1, figures)
    assert codec.decode(codec.encode(report)) == report


def test_huge_counts_and_deep_nesting_are_refused() -> None:
    for type_byte in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):  # array, map, binary, text
        with pytest.raises(PeerFault, match="malformed_header"):
            codec.decode(type_byte + b"\xff\xff\xff\xff" + b"x" * 10)
    with pytest.raises(PeerFault, match="malformed_header"):
        codec.decode(b"\x91" * 100_000)
    with pytest.raises(PeerFault, match="oversized_header"):
        codec.decode(bytes(codec.MAX_HEADER_BYTES + 1))


def test_encode_refuses_an_invalid_message_of_our_own() -> None:
    with pytest.raises(ValueError, match="source must be in"):
        codec.encode(Welcome(b"12345678", 0, -1))


@given(st.sets(st.integers(0, 99)))
def test_bitmaps_round_trip_and_refuse_uids_beyond_the_run(uids: set[int]) -> None:
    assert codec.from_bitmap(codec.to_bitmap(uids, 100), 100) == uids
    if uids and max(uids) >= 50:
        with pytest.raises(PeerFault, match="unknown_uid"):
            codec.from_bitmap(codec.to_bitmap(uids, 100), 50)
