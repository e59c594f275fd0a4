"""The prefix of every message: golden bytes, and that no flipped bit passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire import seal

GOLDEN = [
    (seal.NONE, "0700000000000000 00000000 0000000000000000 68"),
    (seal.CRC32, "0700000000000000 01000000 34e1519d00000000 68"),
    (seal.XXH3, "0700000000000000 02000000 d9428cdccb63ca93 68"),
]


@pytest.mark.parametrize(("kind", "golden"), GOLDEN)
def test_golden_bytes(kind: int, golden: str) -> None:
    assert seal.sealed(7, b"h", kind, seal.body_sum(kind, b"body")).hex() == golden.replace(" ", "")


@pytest.mark.parametrize("kind", [seal.CRC32, seal.XXH3])
@given(st.integers(0, seal.MAX_SEQUENCE - 1), st.binary(min_size=1, max_size=40), st.binary(max_size=200), st.data())
def test_no_flipped_bit_passes(kind: int, sequence: int, header: bytes, body: bytes, data: st.DataObject) -> None:
    frame = seal.sealed(sequence, header, kind, seal.body_sum(kind, body))
    assert seal.opened(frame) == (sequence, kind, seal.PREFIX.unpack_from(frame)[2], header)
    seal.verify(*seal.opened(frame)[:3], header, body)
    whole = bytearray(frame + body)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    if 64 <= bit < 96:
        return  # the kind itself: another kind is another promise
    whole[bit >> 3] ^= 1 << (bit & 7)
    with pytest.raises(PeerFault):
        found = seal.opened(bytes(whole[: len(frame)]))
        seal.verify(*found, bytes(whole[len(frame) :]))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_prefix_or_a_fault(data: bytes) -> None:
    try:
        sequence, kind, _, header = seal.opened(data)
    except PeerFault:
        return
    assert 0 <= sequence < seal.MAX_SEQUENCE and kind <= seal.AES_GCM and len(header) == len(data) - seal.PREFIX.size


def test_nonces_differ() -> None:
    assert len({seal.nonce(sequence) for sequence in (0, 1, 256, seal.MAX_SEQUENCE - 1)}) == 4
    assert len(seal.nonce(seal.MAX_SEQUENCE - 1)) == 12
