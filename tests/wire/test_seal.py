"""The prefix of every message: golden bytes, and that no flipped bit passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire import seal

GOLDEN = [
    (seal.NONE, "0700000000000000 0000 {} 0000000000000000 68"),
    (seal.CRC32, "0700000000000000 0100 {} 34e1519d00000000 68"),
    (seal.XXH3, "0700000000000000 0200 {} d9428cdccb63ca93 68"),
]
"""The bytes of protocol version 4, but for the header's size: a change here needs a new version."""


@pytest.mark.parametrize(("kind", "golden"), GOLDEN)
def test_golden_bytes(kind: int, golden: str) -> None:
    sum_ = seal.body_sum(kind, b"body")
    alone, joined = (golden.format(size).replace(" ", "") for size in ("0000", "0100"))
    assert seal.sealed(7, b"h", kind, sum_).hex() == alone
    assert seal.sealed(7, b"h", kind, sum_, b"body").hex() == joined + b"body".hex()


def split(frame: bytes, rest: bytes | None) -> tuple[int, int, int, bytes, bytes]:
    """What a receiver makes of a message: sequence, kind, sum, header, body. rest: the second frame."""
    *found, body = seal.opened(memoryview(frame))
    if body is not None and rest is not None:
        raise PeerFault("malformed_multipart", "a body in either frame")
    return (*found, bytes(body if body is not None else rest or b""))  # type: ignore[return-value]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("kind", [seal.CRC32, seal.XXH3])
@given(st.integers(0, seal.MAX_SEQUENCE - 1), st.binary(min_size=1, max_size=40), st.binary(max_size=200), st.data())
def test_no_flipped_bit_passes(
    kind: int, joined: bool, sequence: int, header: bytes, body: bytes, data: st.DataObject
) -> None:
    frame = seal.sealed(sequence, header, kind, seal.body_sum(kind, body), body if joined else None)
    rest = None if joined else body
    found = split(frame, rest)
    assert found == (sequence, kind, seal.PREFIX.unpack_from(frame)[3], header, body)
    seal.verify(*found)
    whole = bytearray(frame + (rest or b""))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    if 64 <= bit < 80:
        return  # the kind itself: another kind is another promise
    whole[bit >> 3] ^= 1 << (bit & 7)
    with pytest.raises(PeerFault):
        seal.verify(*split(bytes(whole[: len(frame)]), None if rest is None else bytes(whole[len(frame) :])))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_prefix_or_a_fault(data: bytes) -> None:
    try:
        sequence, kind, _, header, body = seal.opened(memoryview(data))
    except PeerFault as fault:
        assert fault.reason == "malformed_header"
        return
    assert 0 <= sequence < seal.MAX_SEQUENCE and kind <= seal.AES_GCM
    assert header + bytes(body or b"") == data[seal.PREFIX.size :] and (body is None or header)


def test_a_header_longer_than_its_frame_is_a_fault() -> None:
    frame = bytearray(seal.sealed(7, b"header", seal.NONE, 0, b""))
    assert seal.opened(memoryview(frame))[3:] == (b"header", memoryview(b""))
    for size in (7, 0xFFFF):
        frame[10:12] = size.to_bytes(2, "little")
        with pytest.raises(PeerFault, match="header in 26 bytes"):
            seal.opened(memoryview(frame))


def test_nonces_differ() -> None:
    assert len({seal.nonce(sequence) for sequence in (0, 1, 256, seal.MAX_SEQUENCE - 1)}) == 4
    assert len(seal.nonce(seal.MAX_SEQUENCE - 1)) == 12
