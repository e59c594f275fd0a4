"""Doorbells survive encoding and decoding, and all other bytes are refused."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire.doorbell import MAGIC, Doorbells
from decentnode.wire.generation import FIRST, Name, new_origin
from decentnode.wire.messages import MAX_NODES, MAX_ROUND, PROTOCOL_VERSION, Slot

RUN = b"run 1234"


def make_doorbells(uid: int = 3, run: bytes = RUN, generation: Name = FIRST) -> Doorbells:
    def check(slot: Slot) -> None:
        if slot.run != RUN:
            raise PeerFault("wrong_run", slot.run.hex())
        if (slot.generation, slot.origin) != FIRST:
            raise PeerFault("wrong_generation", str(slot.generation))

    return Doorbells(uid, run, generation, check)


packed_totals = st.lists(st.integers(0, 2**64 - 1), max_size=64).map(
    lambda sizes: b"".join(size.to_bytes(8, "little") for size in sizes)
)
texts = st.text(max_size=20)
scalar_dicts = st.dictionaries(texts, st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts, max_size=8)


@given(
    st.integers(0, MAX_NODES - 1), st.integers(0, MAX_ROUND - 1), st.integers(0, 255), st.integers(0, 1),
    st.integers(0, 2**62 - 1), packed_totals, scalar_dicts,
)  # fmt: skip
def test_an_opened_doorbell_equals_the_one_that_was_made(
    uid: int, round: int, phase: int, slot: int, use: int, totals: bytes, scalars: dict[str, int | float | str]
) -> None:
    datagram = make_doorbells(uid).make(round, phase, slot, use, totals, scalars)
    assert make_doorbells().open(datagram) == (uid, round, phase, slot, use, totals, scalars)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(PeerFault):
        make_doorbells().open(junk)


@given(st.data())
def test_a_damaged_doorbell_is_refused_or_has_values_within_bounds(data: st.DataObject) -> None:
    datagram = bytearray(make_doorbells().make(7, 0, 1, 9, (5).to_bytes(8, "little"), {"loss": 0.5}))
    index = data.draw(st.integers(0, len(datagram) - 1))
    datagram[index] ^= data.draw(st.integers(1, 255))
    length = data.draw(st.integers(0, len(datagram)))
    try:
        source, round, _, slot, use, totals, scalars = make_doorbells().open(bytes(datagram[:length]))
    except PeerFault:
        return
    assert length == len(datagram) and round < MAX_ROUND and slot < 2 and use < 1 << 62
    assert source >= 0 and len(totals) % 8 == 0 and all(isinstance(name, str) for name in scalars)


@pytest.mark.parametrize(
    ("other", "reason"),
    [(make_doorbells(run=b"run 9999"), "wrong_run"), (make_doorbells(generation=(1, FIRST[1])), "wrong_generation"),
     (make_doorbells(generation=(0, new_origin(1, os.urandom))), "wrong_generation")],
)
def test_a_doorbell_of_another_run_or_generation_is_refused_with_the_reason(other: Doorbells, reason: str) -> None:
    with pytest.raises(PeerFault) as caught:
        make_doorbells().open(other.make(0, 0, 0, 1, b"", {}))
    assert caught.value.reason == reason


def test_a_doorbell_of_another_version_or_with_nonzero_padding_is_refused_with_the_reason() -> None:
    datagram = bytearray(make_doorbells().make(0, 0, 0, 1, b"", {}))
    assert datagram[0] == MAGIC
    datagram[1] = PROTOCOL_VERSION + 1
    with pytest.raises(PeerFault) as caught:
        make_doorbells().open(bytes(datagram))
    assert caught.value.reason == "protocol_version"
    datagram[1], datagram[2] = PROTOCOL_VERSION, 1  # byte 2 must be zero
    with pytest.raises(PeerFault) as caught:
        make_doorbells().open(bytes(datagram))
    assert caught.value.reason == "malformed_header"


@pytest.mark.parametrize("wrong", [{"round": MAX_ROUND}, {"slot": 2}, {"use": 1 << 62}])
def test_a_doorbell_with_a_number_out_of_bounds_is_refused(wrong: dict[str, int]) -> None:
    values = {"round": 0, "phase": 0, "slot": 0, "use": 1} | wrong
    with pytest.raises(PeerFault) as caught:
        make_doorbells().open(make_doorbells().make(**values, totals=b"", scalars={}))
    assert caught.value.reason == "malformed_header"


@pytest.mark.parametrize("scalars", [{"a": [1, 2]}, {"a": {"b": 1}}, {"x" * 100: 1}, {"a": "y" * 300}, {"a": None}])
def test_a_doorbell_with_an_invalid_scalar_is_refused(scalars: dict[str, object]) -> None:
    with pytest.raises(PeerFault) as caught:
        make_doorbells().open(make_doorbells().make(0, 0, 0, 1, b"", scalars))  # type: ignore[arg-type]
    assert caught.value.reason == "malformed_header"


def test_a_doorbell_has_the_bytes_of_this_protocol_version() -> None:
    datagram = make_doorbells(2).make(300, 1, 1, 5, (90_000).to_bytes(8, "little"), {"k": 2})
    assert datagram.hex(" ") == (
        "db 0e 00 00 72 75 6e 20 31 32 33 34 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 "
        "02 00 00 00 2c 01 00 00 00 00 00 00 05 00 00 00 00 00 00 00 "
        "01 00 04 00 01 01 90 5f 01 00 00 00 00 00 81 a1 6b 02"
    )
