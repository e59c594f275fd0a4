"""Messages as they travel: short bodies behind their header, long ones in a frame of their own, encrypted or not."""

from __future__ import annotations

import pytest
import zmq

from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.protocol.credentials import TAG_BYTES, BulkCredential, Cipher
from decentnode.communication.zeromq.protocol.link_state import ONE_FRAME_BYTES, QueuedMessage, ReceiveCredits
from decentnode.errors import PeerFault
from decentnode.wire import framing

CASES = [(0, False), (1, False), (ONE_FRAME_BYTES, False), (ONE_FRAME_BYTES + 1, True), (1 << 20, True)]


def buffer(frame: zmq.Frame | bytes) -> memoryview:
    return memoryview(frame) if isinstance(frame, bytes) else frame.buffer


@pytest.mark.parametrize(("size", "apart"), CASES)
def test_short_bodies_stand_behind_their_header(size: int, apart: bool) -> None:
    body = bytearray(b"b" * size)
    message = QueuedMessage.bulk(b"header", memoryview(body), framing.XXH3)
    assert message.cost == size + MESSAGE_COST
    body[:] = b"c" * size  # it was copied: no lease
    first, second = message.frames(7, None)
    sequence, kind, sum_, header, found = framing.opened(memoryview(first))
    assert (sequence, header, second is not None, found is None) == (7, b"header", apart, apart)
    whole = found if found is not None else buffer(second)  # type: ignore[arg-type]
    assert bytes(whole) == b"b" * size
    framing.verify(sequence, kind, sum_, header, whole, not apart)


@pytest.mark.parametrize("size", [0, ONE_FRAME_BYTES - TAG_BYTES, ONE_FRAME_BYTES - TAG_BYTES + 1, 1 << 20])
def test_what_counts_is_the_size_after_encryption(size: int) -> None:
    given, body = BulkCredential(), b"b" * size
    message = QueuedMessage.bulk(b"header", memoryview(body), framing.NONE)
    first, second = message.frames(7, Cipher(given))
    _, kind, sum_, header, found = framing.opened(memoryview(first))
    assert (kind, sum_, header, found is None) == (framing.AES_GCM, 0, b"header", size + TAG_BYTES > ONE_FRAME_BYTES)
    sent = found if found is not None else buffer(second)  # type: ignore[arg-type]
    assert bytes(Cipher(given).decrypt(7, header, sent)) == body
    for sequence, other in ((8, header), (7, b"Header")):
        with pytest.raises(PeerFault, match="checksum_mismatch"):
            Cipher(given).decrypt(sequence, other, sent)
    with pytest.raises(PeerFault, match="checksum_mismatch"):
        Cipher(given).decrypt(7, header, sent[: TAG_BYTES - 1])


def test_a_header_beyond_what_the_prefix_can_say_keeps_its_frame() -> None:
    for size in (framing.MAX_JOINED_HEADER, framing.MAX_JOINED_HEADER + 1):
        first, second = QueuedMessage.bulk(b"h" * size, memoryview(b"body"), framing.NONE).frames(1, None)
        header, body = framing.opened(memoryview(first))[3:]
        assert header == b"h" * size and (body is None) == (second is not None) == (size > framing.MAX_JOINED_HEADER)


def test_only_long_bodies_are_sent_from_where_they_lie() -> None:
    lease = object()
    sizes = (8, ONE_FRAME_BYTES + 1)
    short, long = (QueuedMessage.bulk(b"h", memoryview(bytearray(n)), framing.NONE, lease) for n in sizes)
    assert short.lease is None and long.lease is lease


def test_a_sender_hears_of_its_window_once_per_quarter_of_it() -> None:
    """Not with every payload that is used up, which would be a message each; each peer has a window of its own."""
    credits = ReceiveCredits(window=6400)
    told = [credits.consumed(1, 100) for _ in range(64)]
    assert [(number, allowed) for number, allowed in enumerate(told, 1) if allowed is not None] == [
        (16, 8000), (32, 9600), (48, 11200), (64, 12800)]  # fmt: skip
    assert credits.consumed(2, 1599) is None and credits.consumed(2, 5000) == 6599 + 6400
    credits.clear()
    assert credits.consumed(2, 1600) == 1600 + 6400
