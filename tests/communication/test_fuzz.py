"""Random messages: sessions and inboxes accept them or refuse them with a PeerFault, and their memory is bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.partial_payload import SlotPayload
from decentnode.communication.run_state import RunState
from decentnode.errors import PeerFault
from decentnode.payload import TensorSpec
from decentnode.wire import codec
from decentnode.wire.messages import FIELDS, MESSAGES, NO_ORIGIN, Chunk, Message
from decentnode.wire.session import Session
from tests.conftest import scale

RUN = b"run-id-8"
SMALL_NUMBERS = (0, 1, 2, 3, 5, 255)


def draw_field(limits: Any, draw: random.Random) -> object:
    if "limit" in limits:
        return draw.choice([*[n for n in SMALL_NUMBERS if n < limits["limit"]], draw.randrange(limits["limit"])])
    if "blob" in limits:
        size = limits["blob"] if limits["exact"] else draw.choice([0, 1, 8, min(64, limits["blob"])])
        return draw.choice([RUN, bytes(8)]) if size == 8 else draw.randbytes(size)
    if "text" in limits:
        return draw.choice(["", "a", "mean/0", "same", "x" * min(40, limits["text"])])
    return {f"s{i}": draw.choice([0, 1.5, -3, "text", float("nan")]) for i in range(draw.randrange(3))}


def draw_message(draw: random.Random) -> Message:
    kind = draw.choice(list(MESSAGES.values()))
    values = {field.name: draw_field(field.metadata, draw) for field in FIELDS[kind]}
    if draw.random() < 0.9:  # mostly of this run and generation, from a node that exists
        values |= {"run": RUN, "generation": 0, "source": draw.randrange(8), "origin": NO_ORIGIN}
    return kind(**values)


@pytest.mark.parametrize("uid", [0, 1, 6])
def test_a_session_accepts_or_refuses_any_message_in_bounded_memory(uid: int) -> None:
    draw = random.Random(uid)
    session = Session(uid, 7, "same", RUN if uid == 0 else None)
    num_sent = 0
    for count in range(scale(4000, 100_000)):
        message = draw_message(draw)
        assert repr(codec.decode(codec.encode(message))) == repr(message)  # NaN is not equal to itself
        try:
            events = session.receive(message, float(count))
        except PeerFault as fault:
            assert fault.reason
            events = []
        assert len(events) <= 8
        if count % 50 == 0:
            session.tick(float(count))
        num_sent += len(session.outbox)
        assert len(session.outbox) <= 64, "one message caused too many answers"
        session.outbox.clear()
    held = sum(len(value) for value in vars(session).values() if isinstance(value, dict | set | list))
    assert held <= 64, "messages of strangers accumulate"
    assert num_sent > 0


@pytest.mark.parametrize("elementwise", [True, False])
def test_the_inbox_accepts_or_refuses_any_chunk_in_bounded_memory(elementwise: bool) -> None:
    draw = random.Random(int(elementwise))
    specs = {"x": TensorSpec(torch.float32, 600_000)} if elementwise else {
        "i": TensorSpec(torch.uint8, 900, exact=False), "v": TensorSpec(torch.float32, 700, exact=False)}  # fmt: skip
    accepted_bytes = consumed_bytes = 0

    def count_consumed(_uid: int, size: int) -> None:
        nonlocal consumed_bytes
        consumed_bytes += size

    inbox = Inbox((Schema(600_000, specs, elementwise),), 1 << 20, RunState(), Counters(), count_consumed)
    totals = (0, 1, 10, 700, 900, 901, 600_000, 1 << 40)
    accepted = refused = 0
    for step in range(scale(4000, 100_000)):
        round = max(0, step // 100 + draw.randrange(-2, 3))
        message = Chunk(RUN, 0, draw.randrange(4), round, draw.choice((0, 0, 0, 1, 255)), draw.choice((0, 0, 1, 2)),
                        draw.choice((0, 1, 2, 9)), draw.choice(totals), {})  # fmt: skip
        size = draw.choice((0, 1, 4, 40, 2800, 900, 600_000 * 4 - (1 << 20), 1 << 20))
        try:
            inbox.put(message, memoryview(bytearray(size)), 0.0)
            accepted += 1
            accepted_bytes += size + MESSAGE_COST
        except PeerFault as fault:
            assert fault.reason in ("wrong_shape", "wrong_size", "stale_round", "duplicate_chunk", "wrong_type")
            refused += 1
        if step % 100 == 0:
            inbox.advance(step // 100)
    inbox.advance(1 << 30)
    assert accepted and refused and not inbox.state.incoming, "payloads of past rounds are kept"
    assert consumed_bytes == accepted_bytes, "some bytes were not returned to their sender's window"
    assert inbox.state._floor == 1 << 30 and len(inbox.state._finished) <= 64


class FakeBufferReader:
    """Stands in for the reader of a publish buffer."""

    on_device = False

    def __init__(self, elements: int) -> None:
        self.slots = [[[torch.zeros(elements)] for _ in range(2)]]
        self.released: list[tuple[int, int, int]] = []

    def release(self, phase: int, slot: int, use: int) -> None:
        self.released.append((phase, slot, use))


@pytest.mark.parametrize("exact", [True, False])
def test_the_inbox_accepts_or_refuses_any_doorbell_in_bounded_memory(exact: bool) -> None:
    draw = random.Random(int(exact))
    spec = {"x": TensorSpec(torch.float32, 1000, exact=exact)}
    inbox = Inbox((Schema(1000, spec, exact),), 1 << 20, RunState(), Counters(), lambda _uid, _size: None)
    readers = [FakeBufferReader(1000) for _ in range(4)]
    sizes = [b"", *((n).to_bytes(8, "little") for n in (0, 1, 999, 1000, 1001, 1 << 40)), bytes(16)]
    outcomes: dict[str, int] = {}
    for step in range(scale(4000, 100_000)):
        now = step // 20
        round = draw.choice([max(0, now + draw.randrange(-2, 4)), draw.randrange(1 << 40)])
        source = draw.randrange(4)
        packed = draw.choice([sizes[4], sizes[4], *sizes])
        try:
            payload = SlotPayload(readers[source], draw.choice((0, 0, 0, 1, 255)), draw.randrange(2), step, {})  # type: ignore[arg-type]
            size = inbox.put_slot(source, round, packed, payload)
            assert size == 4 * int.from_bytes(packed, "little") and packed and (size == 4000 or not exact)
            outcomes["accepted"] = outcomes.get("accepted", 0) + 1
        except PeerFault as fault:
            outcomes[fault.reason] = outcomes.get(fault.reason, 0) + 1
        assert sum(map(len, inbox.state.incoming.values())) <= 4 * 2, "more payloads than the sources have slots"
        if step % 20 == 0:
            inbox.advance(now)
            inbox.state.incoming = {key: sources for key, sources in inbox.state.incoming.items() if key[0] < now + 9}
    assert set(outcomes) == {"accepted", "wrong_shape", "stale_round", "duplicate_chunk", "window_exceeded"}
    inbox.advance(1 << 41)
    assert not inbox.state.incoming and all(reader.released for reader in readers)


def test_payloads_that_arrived_as_chunks_do_not_count_as_slots_in_use() -> None:
    """A sender whose neighbors get different payloads rings a doorbell in some rounds and sends chunks in others."""
    spec = {"x": TensorSpec(torch.float32, 10, exact=False)}
    inbox = Inbox((Schema(10, spec, False),), 1 << 20, RunState(), Counters(), lambda _uid, _size: None)
    packed = (10).to_bytes(8, "little")
    for round in range(6):
        inbox.put(Chunk(RUN, 0, 1, round, 0, 0, 0, 10, {}), memoryview(bytearray(40)), 0.0)
    for use, round in enumerate((6, 8)):
        assert inbox.put_slot(1, round, packed, SlotPayload(FakeBufferReader(10), 0, use, use, {})) == 40  # type: ignore[arg-type]
    inbox.put(Chunk(RUN, 0, 1, 7, 0, 0, 0, 10, {}), memoryview(bytearray(40)), 0.0)
    with pytest.raises(PeerFault, match="more than 2 slots of 1"):
        inbox.put_slot(1, 9, packed, SlotPayload(FakeBufferReader(10), 0, 0, 2, {}))  # type: ignore[arg-type]
