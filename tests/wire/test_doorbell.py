"""Doorbells: what is made is opened again, and no other bytes are."""

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


def ends(uid: int = 3, run: bytes = RUN, generation: Name = FIRST) -> Doorbells:
    def refuse(slot: Slot) -> None:
        if slot.run != RUN:
            raise PeerFault("wrong_run", slot.run.hex())
        if (slot.generation, slot.origin) != FIRST:
            raise PeerFault("wrong_generation", str(slot.generation))

    return Doorbells(uid, run, generation, refuse)


totals = st.lists(st.integers(0, 2**64 - 1), max_size=64).map(
    lambda sizes: b"".join(size.to_bytes(8, "little") for size in sizes)
)
words = st.text(max_size=20)
scalars = st.dictionaries(words, st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words, max_size=8)


@given(
    st.integers(0, MAX_NODES - 1), st.integers(0, MAX_ROUND - 1), st.integers(0, 255), st.integers(0, 1),
    st.integers(0, 2**62 - 1), totals, scalars,
)  # fmt: skip
def test_what_is_made_is_opened(
    uid: int, round: int, phase: int, slot: int, use: int, packed: bytes, named: dict[str, int | float | str]
) -> None:
    datagram = ends(uid).make(round, phase, slot, use, packed, named)
    assert ends().open(datagram) == (uid, round, phase, slot, use, packed, named)


@given(st.binary(max_size=200))
def test_no_other_bytes_are_a_doorbell(junk: bytes) -> None:
    with pytest.raises(PeerFault):
        ends().open(junk)


@given(st.data())
def test_a_damaged_doorbell_is_a_fault_or_another_doorbell(data: st.DataObject) -> None:
    datagram = bytearray(ends().make(7, 0, 1, 9, (5).to_bytes(8, "little"), {"loss": 0.5}))
    place = data.draw(st.integers(0, len(datagram) - 1))
    datagram[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(datagram)))
    try:
        source, round, _, slot, use, packed, named = ends().open(bytes(datagram[:cut]))
    except PeerFault:
        return
    assert cut == len(datagram) and round < MAX_ROUND and slot < 2 and use < 1 << 62
    assert source >= 0 and len(packed) % 8 == 0 and all(isinstance(name, str) for name in named)


@pytest.mark.parametrize(
    ("other", "reason"),
    [(ends(run=b"run 9999"), "wrong_run"), (ends(generation=(1, FIRST[1])), "wrong_generation"),
     (ends(generation=(0, new_origin(1, os.urandom))), "wrong_generation")],
)
def test_another_run_or_generation_is_refused_by_name(other: Doorbells, reason: str) -> None:
    with pytest.raises(PeerFault) as caught:
        ends().open(other.make(0, 0, 0, 1, b"", {}))
    assert caught.value.reason == reason


def test_another_version_is_refused_by_name() -> None:
    datagram = bytearray(ends().make(0, 0, 0, 1, b"", {}))
    assert datagram[0] == MAGIC
    datagram[1] = PROTOCOL_VERSION + 1
    with pytest.raises(PeerFault) as caught:
        ends().open(bytes(datagram))
    assert caught.value.reason == "protocol_version"
    datagram[1], datagram[2] = PROTOCOL_VERSION, 1  # a zero that is none
    with pytest.raises(PeerFault) as caught:
        ends().open(bytes(datagram))
    assert caught.value.reason == "malformed_header"


@pytest.mark.parametrize("wrong", [{"round": MAX_ROUND}, {"slot": 2}, {"use": 1 << 62}])
def test_numbers_out_of_bounds_are_refused(wrong: dict[str, int]) -> None:
    values = {"round": 0, "phase": 0, "slot": 0, "use": 1} | wrong
    with pytest.raises(PeerFault) as caught:
        ends().open(ends().make(**values, totals=b"", scalars={}))
    assert caught.value.reason == "malformed_header"


@pytest.mark.parametrize("named", [{"a": [1, 2]}, {"a": {"b": 1}}, {"x" * 100: 1}, {"a": "y" * 300}, {"a": None}])
def test_scalars_that_are_none_are_refused(named: dict[str, object]) -> None:
    with pytest.raises(PeerFault) as caught:
        ends().open(ends().make(0, 0, 0, 1, b"", named))  # type: ignore[arg-type]
    assert caught.value.reason == "malformed_header"


def test_golden_bytes() -> None:
    made = ends(2).make(300, 1, 1, 5, (90_000).to_bytes(8, "little"), {"k": 2})
    assert made.hex(" ") == (
        "db 0e 00 00 72 75 6e 20 31 32 33 34 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 "
        "02 00 00 00 2c 01 00 00 00 00 00 00 05 00 00 00 00 00 00 00 "
        "01 00 04 00 01 01 90 5f 01 00 00 00 00 00 81 a1 6b 02"
    )
