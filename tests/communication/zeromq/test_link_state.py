"""Queued messages: short bodies in one frame with their header, long ones in a second frame, encrypted or not."""

from __future__ import annotations

import pytest
import zmq

from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.protocol.credentials import TAG_BYTES, BulkCredential, Cipher
from decentnode.communication.zeromq.protocol.link_state import ONE_FRAME_BYTES, QueuedMessage, ReceiveCredits
from decentnode.errors import PeerFault
from decentnode.wire import framing

SIZES = [(0, False), (1, False), (ONE_FRAME_BYTES, False), (ONE_FRAME_BYTES + 1, True), (1 << 20, True)]


def buffer(frame: zmq.Frame | bytes) -> memoryview:
    return memoryview(frame) if isinstance(frame, bytes) else frame.buffer


@pytest.mark.parametrize(("size", "has_second_frame"), SIZES)
def test_short_bodies_share_a_frame_with_their_header(size: int, has_second_frame: bool) -> None:
    body = bytearray(b"b" * size)
    message = QueuedMessage.bulk(b"header", memoryview(body), framing.XXH3)
    assert message.cost == size + MESSAGE_COST
    body[:] = b"c" * size  # a message without a lease has copied its body
    first, second = message.frames(7, None)
    sequence, kind, checksum, header, joined = framing.opened(memoryview(first))
    assert (sequence, header) == (7, b"header")
    assert (second is not None) == (joined is None) == has_second_frame
    received = joined if joined is not None else buffer(second)  # type: ignore[arg-type]
    assert bytes(received) == b"b" * size
    framing.verify(sequence, kind, checksum, header, received, not has_second_frame)


@pytest.mark.parametrize("size", [0, ONE_FRAME_BYTES - TAG_BYTES, ONE_FRAME_BYTES - TAG_BYTES + 1, 1 << 20])
def test_the_size_after_encryption_decides_about_a_second_frame(size: int) -> None:
    credential, body = BulkCredential(), b"b" * size
    message = QueuedMessage.bulk(b"header", memoryview(body), framing.NONE)
    first, second = message.frames(7, Cipher(credential))
    _, kind, checksum, header, joined = framing.opened(memoryview(first))
    assert (kind, checksum, header) == (framing.AES_GCM, 0, b"header")
    assert (joined is None) == (size + TAG_BYTES > ONE_FRAME_BYTES)
    sent = joined if joined is not None else buffer(second)  # type: ignore[arg-type]
    assert bytes(Cipher(credential).decrypt(7, header, sent)) == body
    for sequence, other in ((8, header), (7, b"Header")):
        with pytest.raises(PeerFault, match="checksum_mismatch"):
            Cipher(credential).decrypt(sequence, other, sent)
    with pytest.raises(PeerFault, match="checksum_mismatch"):
        Cipher(credential).decrypt(7, header, sent[: TAG_BYTES - 1])


def test_a_header_too_long_to_be_joined_gets_a_frame_of_its_own() -> None:
    for size in (framing.MAX_JOINED_HEADER, framing.MAX_JOINED_HEADER + 1):
        first, second = QueuedMessage.bulk(b"h" * size, memoryview(b"body"), framing.NONE).frames(1, None)
        header, body = framing.opened(memoryview(first))[3:]
        assert header == b"h" * size and (body is None) == (second is not None) == (size > framing.MAX_JOINED_HEADER)


def test_only_long_bodies_are_sent_without_a_copy() -> None:
    lease = object()
    sizes = (8, ONE_FRAME_BYTES + 1)
    short, long = (QueuedMessage.bulk(b"h", memoryview(bytearray(n)), framing.NONE, lease) for n in sizes)
    assert short.lease is None and long.lease is lease


def test_credit_is_granted_once_per_quarter_of_the_window() -> None:
    """Not after every payload that is consumed, which would be a message each. Every peer has a window of its own."""
    credits = ReceiveCredits(window=6400)
    grants = [credits.consumed(1, 100) for _ in range(64)]
    assert [(number, allowed) for number, allowed in enumerate(grants, 1) if allowed is not None] == [
        (16, 8000), (32, 9600), (48, 11200), (64, 12800)]  # fmt: skip
    assert credits.consumed(2, 1599) is None and credits.consumed(2, 5000) == 6599 + 6400
    credits.clear()
    assert credits.consumed(2, 1600) == 1600 + 6400
