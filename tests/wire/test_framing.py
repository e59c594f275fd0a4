"""The prefix of every message: its exact bytes, and the detection of flipped bits and invalid sizes."""

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
"""(kind, prefix and header if the body is in a frame of its own, if it is in the same frame), unchanged since protocol
version 6. A change needs a new version."""


@pytest.mark.parametrize(("kind", "separate", "joined"), GOLDEN)
def test_prefixes_have_the_bytes_of_the_protocol(kind: int, separate: str, joined: str) -> None:
    checksum = framing.compute_body_checksum(kind, b"body")
    assert framing.sealed(7, b"h", kind, checksum) == bytes.fromhex(separate)
    assert framing.sealed(7, b"h", kind, checksum, b"body") == bytes.fromhex(joined) + b"body"


def parse(frame: bytes, second_frame: bytes | None) -> tuple[int, int, int, bytes, bytes, bool]:
    """Parses a message as receivers do. Returns (sequence, kind, checksum, header, body, joined). joined: whether the
    body was in the first frame."""
    *prefix_and_header, body = framing.opened(memoryview(frame))
    if body is not None and second_frame is not None:
        raise PeerFault("malformed_multipart", "a body in either frame")
    joined = body is not None
    return (*prefix_and_header, bytes(body if body is not None else second_frame or b""), joined)  # type: ignore[return-value]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("kind", [framing.CRC32, framing.XXH3])
@given(st.integers(0, framing.MAX_SEQUENCE - 1), st.binary(min_size=1, max_size=40), st.binary(max_size=200), st.data())
def test_a_flipped_bit_anywhere_is_detected(
    kind: int, joined: bool, sequence: int, header: bytes, body: bytes, data: st.DataObject
) -> None:
    frame = framing.sealed(sequence, header, kind, framing.compute_body_checksum(kind, body), body if joined else None)
    second = None if joined else body
    parsed = parse(frame, second)
    assert parsed == (sequence, kind, framing.PREFIX.unpack_from(frame)[3], header, body, joined)
    framing.verify(*parsed)
    damaged = bytearray(frame + (second or b""))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit >> 3] ^= 1 << (bit & 7)
    size = len(frame)
    with pytest.raises(PeerFault):
        framing.verify(*parse(bytes(damaged[:size]), None if second is None else bytes(damaged[size:])))


@pytest.mark.parametrize("kind", [framing.CRC32, framing.XXH3])
@pytest.mark.parametrize("size", [1, 2, 8, 64, 256, 3, 40])
@pytest.mark.parametrize("body", [None, b"", b"\0", b"body"])
def test_a_changed_kind_or_header_size_is_detected(kind: int, size: int, body: bytes | None) -> None:
    """A header size of 0 says that the body has a frame of its own. One flipped bit makes a size of 0 out of a power of
    two, and if the body is empty, the rest of the frame then reads the same."""
    header = bytes(number % 256 for number in range(size))
    frame = framing.sealed(7, header, kind, framing.compute_body_checksum(kind, body or b""), body)
    framing.verify(*parse(frame, None))
    true_kind, true_size = frame[8:10], frame[10:12]
    values = {value.to_bytes(2, "little") for value in (*range(len(frame) + 2), *(1 << bit for bit in range(16)))}
    others = [other + true_size for other in values - {true_kind}]
    others += [true_kind + other for other in values - {true_size}]
    for other in others:
        with pytest.raises(PeerFault):
            framing.verify(*parse(frame[:8] + other + frame[12:], None))


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_opened_or_raise_a_peer_fault(data: bytes) -> None:
    try:
        sequence, kind, _, header, body = framing.opened(memoryview(data))
    except PeerFault as fault:
        assert fault.reason == "malformed_header"
        return
    assert 0 <= sequence < framing.MAX_SEQUENCE and kind <= framing.AES_GCM
    assert header + bytes(body or b"") == data[framing.PREFIX.size :] and (body is None or header)


def test_a_header_size_beyond_the_frame_raises_a_peer_fault() -> None:
    frame = bytearray(framing.sealed(7, b"header", framing.NONE, 0, b""))
    assert framing.opened(memoryview(frame))[3:] == (b"header", memoryview(b""))
    for size in (7, 0xFFFF):
        frame[10:12] = size.to_bytes(2, "little")
        with pytest.raises(PeerFault, match="header in 26 bytes"):
            framing.opened(memoryview(frame))


def test_nonces_of_different_sequences_differ() -> None:
    assert len({framing.nonce(sequence) for sequence in (0, 1, 256, framing.MAX_SEQUENCE - 1)}) == 4
    assert len(framing.nonce(framing.MAX_SEQUENCE - 1)) == 12
