"""Slots of shared memory: nobody is given a payload other than the one that it was told of, however late it reads."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentnode.communication.parts import Schema
from decentnode.communication.receive.partial_payload import SlotPayload
from decentnode.communication.shared_memory.layout import SLOTS
from decentnode.communication.shared_memory.publish_buffer import LEASED, PublishBuffer
from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.errors import PeerFault
from decentnode.payload import Payload
from tests.communication.contract import flat_schema
from tests.communication.shared_memory.ends import ELEMENTS, End, close, open_all, owner_and_reader


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="decentnode-") as name:
        yield Path(name)


def test_a_reader_that_was_given_up_on_keeps_its_slots(folder: Path) -> None:
    owner, reader = owner_and_reader(folder)
    told = []
    for round in range(6):
        owner.model.fill_(round + 1.0)
        told.append(owner.send(round, [1]))
        owner.mix()
    assert told == [[1]] * SLOTS + [[]] * (6 - SLOTS)
    reader.hear()
    for round in range(SLOTS):
        (arrival,) = list(exchange.arrivals(0.0)) if (exchange := reader.exchange(round)) else ()
        assert set(arrival.received) == {0}
        reader.inbox.advance(round + 1)
    assert not reader.counters.faults
    owner.model.fill_(9.0)
    assert owner.send(6, [1]) == [1], "who has released everything is told again"
    close(owner, reader)


def test_of_a_late_reader_and_others_the_others_go_on(folder: Path) -> None:
    ends = owner, late, quick = open_all(3, flat_schema(ELEMENTS), folder)
    told = []
    for round in range(9):
        owner.model.fill_(round + 1.0)
        told.append(owner.send(round, [1, 2]))
        quick.hear()
        for arrival in quick.exchange(round).arrivals(0.0):
            assert 0 not in arrival.received or bool((arrival.received[0].tensors["x"] == round + 1.0).all())
            assert (0 in arrival.received) == (2 in told[-1])
        quick.inbox.advance(round + 1)
        if round >= 4:
            late.hear()
            late.inbox.advance(round + 1)
        owner.mix()
    assert told == [[1, 2]] * 2 + [[]] * 3 + [[1, 2]] * 4
    assert not quick.counters.faults
    close(*ends)


def test_what_is_released_of_one_slot_says_nothing_of_another(folder: Path) -> None:
    owner, reader = owner_and_reader(folder)
    buffer, mapped = owner.memory._buffers[False], reader.memory._buffer_readers[0]
    first, second = (buffer.publish(0, Payload({"x": torch.full((ELEMENTS,), v)}), [1], 0.0, lambda _uid: False)
                     for v in (1.0, 2.0))  # fmt: skip
    mapped.release(0, *second)
    buffer.wait_released(0, second[0], 0.0, lambda _uid: False)
    with pytest.raises(TimeoutError):
        buffer.wait_released(0, first[0], 0.0, lambda _uid: False)
    assert bool((mapped.slots[0][first[0]][0] == 1.0).all())
    mapped.release(0, *first)
    buffer.wait_released(0, first[0], 0.0, lambda _uid: False)
    close(owner, reader)


SIZE = ELEMENTS.to_bytes(8, "little")


@pytest.mark.parametrize(("round", "phase", "packed", "reason"), [
    (3, 0, SIZE + SIZE, "wrong_shape"), (3, 0, bytes(8), "wrong_shape"), (1, 0, SIZE, "stale_round"),
    (2, 0, SIZE, "duplicate_chunk"), (5, 0, SIZE, "window_exceeded"),
])  # fmt: skip
def test_a_doorbell_that_is_refused_lets_its_slot_go_and_no_other(
    folder: Path, round: int, phase: int, packed: bytes, reason: str
) -> None:
    owner, reader = owner_and_reader(folder)
    buffer, mapped, inbox = owner.memory._buffers[False], reader.memory._buffer_readers[0], reader.inbox
    inbox.advance(2)
    uses = [buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [1], 0.0, lambda _uid: False) for _ in range(SLOTS)]
    kept = 1 if reason != "window_exceeded" else SLOTS
    for i in range(kept):
        inbox.put_slot(0, 2 + i, SIZE, SlotPayload(mapped, 0, *uses[i], {}))
    slot, use = uses[-1] if kept == 1 else (uses[0][0], uses[0][1] + 10)
    with pytest.raises(PeerFault, match=reason):
        inbox.put_slot(0, round, packed, SlotPayload(mapped, phase, slot, use, {}))
    with pytest.raises(TimeoutError):  # still to be read
        buffer.wait_released(0, uses[0][0], 0.0, lambda _uid: False)
    if kept == 1:
        buffer.wait_released(0, uses[1][0], 0.0, lambda _uid: False)
    close(owner, reader)


def test_a_doorbell_that_comes_twice_does_not_let_go_of_what_the_first_told_of(folder: Path) -> None:
    owner, reader = owner_and_reader(folder)
    buffer, mapped = owner.memory._buffers[False], reader.memory._buffer_readers[0]
    slot, use = buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [1], 0.0, lambda _uid: False)
    reader.inbox.put_slot(0, 0, SIZE, SlotPayload(mapped, 0, slot, use, {}))
    for round in (0, 1 << 41):
        with pytest.raises(PeerFault):
            reader.inbox.put_slot(0, round, SIZE if round == 0 else b"", SlotPayload(mapped, 0, slot, use, {}))
    with pytest.raises(TimeoutError):
        buffer.wait_released(0, slot, 0.0, lambda _uid: False)
    close(owner, reader)


def test_messages_keep_what_they_are_sent_from(folder: Path) -> None:
    """A remote neighbor that acknowledges nothing: neither the model nor a copy goes where its messages lie."""
    owner, reader = owner_and_reader(folder)
    kept: list[tuple[Tensor, float, object]] = []
    leased = 0
    for round in range(8):
        owner.model.fill_(round + 1.0)
        owner.send(round, [1])
        lease = owner.model_slots.lease(owner.model)
        if lease is not None:
            kept.append((owner.model, round + 1.0, lease))
            leased += 1
        reader.hear()
        reader.inbox.advance(round + 1)
        owner.mix()
        assert all(bool((sent == value).all()) for sent, value, _ in kept)
    assert leased == SLOTS and owner.memory._buffers[False].late == {LEASED}
    kept.clear()
    lease = None
    owner.mix()
    owner.send(8, [1])
    assert not owner.memory._buffers[False].late and owner.model_slots.lease(owner.model) is not None
    close(owner, reader)


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_payload_that_is_written_over_while_it_is_read_counts_as_missing(folder: Path, elementwise: bool) -> None:
    """Whatever the owner does: here it breaks its own rule."""
    schema = Schema(ELEMENTS, flat_schema(ELEMENTS)[0].tensors, elementwise)
    owner, reader = owner_and_reader(folder, (schema,))
    for round in range(2):
        owner.send(round, [1], Payload({"x": torch.full((ELEMENTS,), round + 1.0)}))
    reader.hear()
    buffer = owner.memory._buffers[False]
    buffer._holder = lambda *_: None  # type: ignore[method-assign,assignment]
    exchange = reader.exchange(0)
    arrivals = exchange.arrivals(0.0)
    if elementwise:
        arrival = next(arrivals)
        assert set(arrival.received) == {0} and exchange.in_place and not exchange.spoiled()
    owner.send(2, [1], Payload({"x": torch.full((ELEMENTS,), 3.0)}))
    if elementwise:
        assert exchange.spoiled() == {0} == exchange.spoiled()
        assert not list(arrivals)
    else:
        (arrival,) = arrivals
        assert not arrival.received and not exchange.in_place
    assert exchange.missing == {0} and reader.counters.faults == {"overwritten": 1}
    again = reader.exchange(1)
    for arrival in again.arrivals(0.0):
        assert bool((arrival.received[0].tensors["x"] == 2.0).all()) and not again.spoiled()
    close(owner, reader)


def test_the_number_says_that_a_slot_is_being_written_before_its_first_byte_is(folder: Path) -> None:
    owner, reader = owner_and_reader(folder)
    buffer = owner.memory._buffers[False]
    seen: list[list[int]] = []

    class Watched:
        def __getitem__(self, part: slice) -> Watched:
            return self

        def copy_(self, tensor: Tensor) -> None:
            seen.append([buffer._header[buffer.layout.sequence(0, slot)] for slot in range(SLOTS)])

    slot, use = buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [], 0.0, lambda _uid: False)
    assert buffer._header[buffer.layout.sequence(0, slot)] == use
    buffer.slots[0] = [[Watched()] for _ in range(SLOTS)]  # type: ignore[list-item]
    uses = [buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [], 0.0, lambda _uid: False) for _ in range(3)]
    assert [numbers[slot] for numbers, (slot, _) in zip(seen, uses, strict=True)] == [0, 0, 0]
    close(owner, reader)


def test_no_name_is_left_once_everybody_has_the_memory(folder: Path) -> None:
    step = threading.Barrier(2, timeout=20)
    ends = [End(uid, 2, flat_schema(ELEMENTS), folder, lambda *_: step.wait()) for uid in range(2)]
    threads = [
        threading.Thread(target=lambda end=end: end.memory.open(frozenset({1 - end.uid}), 20))  # type: ignore[misc]
        for end in ends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not list(FOLDER.glob(f"{folder.name}-*")), "a crash from here on leaves nothing behind"
    assert all(end.memory.readers for end in ends)
    close(*ends)


def test_readers_of_one_publish_buffer_do_not_wait_for_a_late_reader_of_the_other(folder: Path) -> None:
    """A node has one in the host's memory and one in a GPU's: who reads from the one is told before the other is waited
    for."""
    owner, reader, held = open_all(3, flat_schema(ELEMENTS), folder)
    memory, happened = owner.memory, list[str]()

    class Held(PublishBuffer):
        """Stands in for the one in a GPU's memory, whose reader has released nothing."""

        def __init__(self) -> None:
            self.late = frozenset()

        def is_held(self, *_: object) -> bool:
            return True

        def publish(self, *_: object) -> tuple[int, int]:
            happened.append("waited")
            raise TimeoutError(2)

    ring = memory._ring

    def rings(payload: Payload, uids: list[int], *rest: object) -> None:
        happened.append(f"rang at {uids}")
        ring(payload, uids, *rest)  # type: ignore[arg-type]

    memory._ring = rings  # type: ignore[method-assign,assignment]
    memory._buffers = {True: Held(), **memory._buffers}
    memory._readers_by_memory = {True: frozenset({2}), False: frozenset({1})}
    assert memory.publish(Payload({"x": torch.ones(ELEMENTS)}), [1, 2], (0, 0), 60.0) == [1]
    assert happened == ["rang at [1]", "waited"]
    memory._buffers.pop(True)
    close(owner, reader, held)
