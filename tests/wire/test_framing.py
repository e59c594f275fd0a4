"""The prefix of every message: golden bytes, and that no flipped bit passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire import framing

GOLDEN = [
    (framing.NONE, "0700000000000000 0000 0000 0000000000000000 68", "0700000000000000 0000 0100 0000000000000000 68"),
    (framing.CRC32, "0700000000000000 0100 0000 9be0ffa100000000 68", "0700000000000000 0100 0100 2feb880700000000 68"),
    (framing.XXH3, "0700000000000000 0200 0000 c88aec33e6d63d8e 68", "0700000000000000 0200 0100 9447e364c619e210 68"),
]
"""The bytes of protocol version 6, the body in a frame of its own or in the same: a change needs a new version."""


@pytest.mark.parametrize(("kind", "alone", "joined"), GOLDEN)
def test_golden_bytes(kind: int, alone: str, joined: str) -> None:
    checksum = framing.compute_body_checksum(kind, b"body")
    assert framing.sealed(7, b"h", kind, checksum) == bytes.fromhex(alone)
    assert framing.sealed(7, b"h", kind, checksum, b"body") == bytes.fromhex(joined) + b"body"


def split(frame: bytes, rest: bytes | None) -> tuple[int, int, int, bytes, bytes, bool]:
    """What a receiver makes of a message: sequence, kind, sum, header, body, joined. rest: the second frame."""
    *found, body = framing.opened(memoryview(frame))
    if body is not None and rest is not None:
        raise PeerFault("malformed_multipart", "a body in either frame")
    joined = body is not None
    return (*found, bytes(body if body is not None else rest or b""), joined)  # type: ignore[return-value]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("kind", [framing.CRC32, framing.XXH3])
@given(st.integers(0, framing.MAX_SEQUENCE - 1), st.binary(min_size=1, max_size=40), st.binary(max_size=200), st.data())
def test_no_flipped_bit_passes(
    kind: int, joined: bool, sequence: int, header: bytes, body: bytes, data: st.DataObject
) -> None:
    frame = framing.sealed(sequence, header, kind, framing.compute_body_checksum(kind, body), body if joined else None)
    rest = None if joined else body
    found = split(frame, rest)
    assert found == (sequence, kind, framing.PREFIX.unpack_from(frame)[3], header, body, joined)
    framing.verify(*found)
    whole = bytearray(frame + (rest or b""))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit >> 3] ^= 1 << (bit & 7)
    with pytest.raises(PeerFault):
        framing.verify(*split(bytes(whole[: len(frame)]), None if rest is None else bytes(whole[len(frame) :])))


@pytest.mark.parametrize("kind", [framing.CRC32, framing.XXH3])
@pytest.mark.parametrize("size", [1, 2, 8, 64, 256, 3, 40])
@pytest.mark.parametrize("body", [None, b"", b"\0", b"body"])
def test_no_other_kind_and_no_other_end_of_the_header_passes(kind: int, size: int, body: bytes | None) -> None:
    """Also where the header's size loses its one bit, and the header takes an empty body with it."""
    header = bytes(number % 256 for number in range(size))
    frame = framing.sealed(7, header, kind, framing.compute_body_checksum(kind, body or b""), body)
    framing.verify(*split(frame, None))
    true_kind, true_size = frame[8:10], frame[10:12]
    values = {value.to_bytes(2, "little") for value in (*range(len(frame) + 2), *(1 << bit for bit in range(16)))}
    others = [other + true_size for other in values - {true_kind}]
    others += [true_kind + other for other in values - {true_size}]
    for other in others:
        with pytest.raises(PeerFault):
            framing.verify(*split(frame[:8] + other + frame[12:], None))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_prefix_or_a_fault(data: bytes) -> None:
    try:
        sequence, kind, _, header, body = framing.opened(memoryview(data))
    except PeerFault as fault:
        assert fault.reason == "malformed_header"
        return
    assert 0 <= sequence < framing.MAX_SEQUENCE and kind <= framing.AES_GCM
    assert header + bytes(body or b"") == data[framing.PREFIX.size :] and (body is None or header)


def test_a_header_longer_than_its_frame_is_a_fault() -> None:
    frame = bytearray(framing.sealed(7, b"header", framing.NONE, 0, b""))
    assert framing.opened(memoryview(frame))[3:] == (b"header", memoryview(b""))
    for size in (7, 0xFFFF):
        frame[10:12] = size.to_bytes(2, "little")
        with pytest.raises(PeerFault, match="header in 26 bytes"):
            framing.opened(memoryview(frame))


def test_nonces_differ() -> None:
    assert len({framing.nonce(sequence) for sequence in (0, 1, 256, framing.MAX_SEQUENCE - 1)}) == 4
    assert len(framing.nonce(framing.MAX_SEQUENCE - 1)) == 12
