"""Slots of publish buffers: a reader gets the payload of which it was notified, or none, however late it reads."""

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
from tests.communication.shared_memory.memory_nodes import (
    ELEMENTS,
    MemoryNode,
    close_nodes,
    open_nodes,
    open_owner_and_reader,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="decentnode-") as name:
        yield Path(name)


def test_slots_of_a_reader_that_is_behind_are_not_reused(folder: Path) -> None:
    owner, reader = open_owner_and_reader(folder)
    notified = []
    for round in range(6):
        owner.model.fill_(round + 1.0)
        notified.append(owner.send(round, [1]))
        owner.move_model()
    assert notified == [[1]] * SLOTS + [[]] * (6 - SLOTS)
    reader.receive_doorbells()
    for round in range(SLOTS):
        (arrival,) = list(exchange.arrivals(0.0)) if (exchange := reader.exchange(round)) else ()
        assert set(arrival.received) == {0}
        reader.inbox.advance(round + 1)
    assert not reader.counters.faults
    owner.model.fill_(9.0)
    assert owner.send(6, [1]) == [1], "a reader that has released all slots is notified again"
    close_nodes(owner, reader)


def test_the_other_readers_continue_while_one_is_late(folder: Path) -> None:
    nodes = owner, late, fast = open_nodes(3, flat_schema(ELEMENTS), folder)
    notified = []
    for round in range(9):
        owner.model.fill_(round + 1.0)
        notified.append(owner.send(round, [1, 2]))
        fast.receive_doorbells()
        for arrival in fast.exchange(round).arrivals(0.0):
            assert 0 not in arrival.received or bool((arrival.received[0].tensors["x"] == round + 1.0).all())
            assert (0 in arrival.received) == (2 in notified[-1])
        fast.inbox.advance(round + 1)
        if round >= 4:
            late.receive_doorbells()
            late.inbox.advance(round + 1)
        owner.move_model()
    assert notified == [[1, 2]] * 2 + [[]] * 3 + [[1, 2]] * 4
    assert not fast.counters.faults
    close_nodes(*nodes)


def test_releasing_one_slot_does_not_release_another(folder: Path) -> None:
    owner, reader = open_owner_and_reader(folder)
    buffer, buffer_reader = owner.memory._buffers[False], reader.memory._buffer_readers[0]
    first, second = (buffer.publish(0, Payload({"x": torch.full((ELEMENTS,), v)}), [1], 0.0, lambda _uid: False)
                     for v in (1.0, 2.0))  # fmt: skip
    buffer_reader.release(0, *second)
    buffer.wait_released(0, second[0], 0.0, lambda _uid: False)
    with pytest.raises(TimeoutError):
        buffer.wait_released(0, first[0], 0.0, lambda _uid: False)
    assert bool((buffer_reader.slots[0][first[0]][0] == 1.0).all())
    buffer_reader.release(0, *first)
    buffer.wait_released(0, first[0], 0.0, lambda _uid: False)
    close_nodes(owner, reader)


SIZE = ELEMENTS.to_bytes(8, "little")
"""The number of elements, as a doorbell encodes it."""


@pytest.mark.parametrize(("round", "phase", "packed", "reason"), [
    (3, 0, SIZE + SIZE, "wrong_shape"), (3, 0, bytes(8), "wrong_shape"), (1, 0, SIZE, "stale_round"),
    (2, 0, SIZE, "duplicate_chunk"), (5, 0, SIZE, "window_exceeded"),
])  # fmt: skip
def test_a_refused_doorbell_releases_its_own_slot_only(
    folder: Path, round: int, phase: int, packed: bytes, reason: str
) -> None:
    owner, reader = open_owner_and_reader(folder)
    buffer, buffer_reader, inbox = owner.memory._buffers[False], reader.memory._buffer_readers[0], reader.inbox
    inbox.advance(2)
    uses = [buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [1], 0.0, lambda _uid: False) for _ in range(SLOTS)]
    kept = 1 if reason != "window_exceeded" else SLOTS
    for i in range(kept):
        inbox.put_slot(0, 2 + i, SIZE, SlotPayload(buffer_reader, 0, *uses[i], {}))
    slot, use = uses[-1] if kept == 1 else (uses[0][0], uses[0][1] + 10)
    with pytest.raises(PeerFault, match=reason):
        inbox.put_slot(0, round, packed, SlotPayload(buffer_reader, phase, slot, use, {}))
    with pytest.raises(TimeoutError):  # its payload was accepted, and is not read yet
        buffer.wait_released(0, uses[0][0], 0.0, lambda _uid: False)
    if kept == 1:
        buffer.wait_released(0, uses[1][0], 0.0, lambda _uid: False)
    close_nodes(owner, reader)


def test_a_second_copy_of_a_doorbell_does_not_release_the_slot(folder: Path) -> None:
    owner, reader = open_owner_and_reader(folder)
    buffer, buffer_reader = owner.memory._buffers[False], reader.memory._buffer_readers[0]
    slot, use = buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [1], 0.0, lambda _uid: False)
    reader.inbox.put_slot(0, 0, SIZE, SlotPayload(buffer_reader, 0, slot, use, {}))
    for round in (0, 1 << 41):
        with pytest.raises(PeerFault):
            reader.inbox.put_slot(0, round, SIZE if round == 0 else b"", SlotPayload(buffer_reader, 0, slot, use, {}))
    with pytest.raises(TimeoutError):
        buffer.wait_released(0, slot, 0.0, lambda _uid: False)
    close_nodes(owner, reader)


def test_slots_that_messages_are_sent_from_are_not_overwritten(folder: Path) -> None:
    """A remote neighbor acknowledges nothing: neither the model nor a copy may be written to a slot from which messages
    to it are sent."""
    owner, reader = open_owner_and_reader(folder)
    unacknowledged: list[tuple[Tensor, float, object]] = []
    num_leased = 0
    for round in range(8):
        owner.model.fill_(round + 1.0)
        owner.send(round, [1])
        lease = owner.model_slots.lease(owner.model)
        if lease is not None:
            unacknowledged.append((owner.model, round + 1.0, lease))
            num_leased += 1
        reader.receive_doorbells()
        reader.inbox.advance(round + 1)
        owner.move_model()
        assert all(bool((sent == value).all()) for sent, value, _ in unacknowledged)
    assert num_leased == SLOTS and owner.memory._buffers[False].late == {LEASED}
    unacknowledged.clear()
    lease = None
    owner.move_model()
    owner.send(8, [1])
    assert not owner.memory._buffers[False].late and owner.model_slots.lease(owner.model) is not None
    close_nodes(owner, reader)


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_payload_that_is_overwritten_while_it_is_read_counts_as_missing(folder: Path, elementwise: bool) -> None:
    """The owner is made to ignore that a slot is still read."""
    schema = Schema(ELEMENTS, flat_schema(ELEMENTS)[0].tensors, elementwise)
    owner, reader = open_owner_and_reader(folder, (schema,))
    for round in range(2):
        owner.send(round, [1], Payload({"x": torch.full((ELEMENTS,), round + 1.0)}))
    reader.receive_doorbells()
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
    close_nodes(owner, reader)


def test_the_sequence_number_marks_a_slot_as_being_written_before_the_first_byte_is_written(folder: Path) -> None:
    owner, reader = open_owner_and_reader(folder)
    buffer = owner.memory._buffers[False]
    numbers_at_copy: list[list[int]] = []

    class RecordingSlot:
        """Records the sequence numbers of all slots when it is written."""

        def __getitem__(self, part: slice) -> RecordingSlot:
            return self

        def copy_(self, tensor: Tensor) -> None:
            numbers_at_copy.append([buffer._header[buffer.layout.sequence(0, slot)] for slot in range(SLOTS)])

    slot, use = buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [], 0.0, lambda _uid: False)
    assert buffer._header[buffer.layout.sequence(0, slot)] == use
    buffer.slots[0] = [[RecordingSlot()] for _ in range(SLOTS)]  # type: ignore[list-item]
    uses = [buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [], 0.0, lambda _uid: False) for _ in range(3)]
    assert [numbers[slot] for numbers, (slot, _) in zip(numbers_at_copy, uses, strict=True)] == [0, 0, 0]
    close_nodes(owner, reader)


def test_no_file_is_left_once_all_nodes_have_mapped_the_memory(folder: Path) -> None:
    barrier = threading.Barrier(2, timeout=20)
    nodes = [MemoryNode(uid, 2, flat_schema(ELEMENTS), folder, lambda *_: barrier.wait()) for uid in range(2)]
    threads = [
        threading.Thread(target=lambda node=node: node.memory.open(frozenset({1 - node.uid}), 20))  # type: ignore[misc]
        for node in nodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not list(FOLDER.glob(f"{folder.name}-*")), "a crash would leave files behind"
    assert all(node.memory.readers for node in nodes)
    close_nodes(*nodes)


def test_readers_of_one_publish_buffer_do_not_wait_for_a_late_reader_of_the_other(folder: Path) -> None:
    """A node may have a buffer in host memory and one in the memory of a GPU. It notifies the readers of the one before
    it waits for a reader of the other."""
    owner, reader, late = open_nodes(3, flat_schema(ELEMENTS), folder)
    memory, events = owner.memory, list[str]()

    class HeldBuffer(PublishBuffer):
        """Stands in for the buffer in a GPU's memory, whose reader has released nothing."""

        def __init__(self) -> None:
            self.late = frozenset()

        def is_held(self, *_: object) -> bool:
            return True

        def publish(self, *_: object) -> tuple[int, int]:
            events.append("waited")
            raise TimeoutError(2)

    ring = memory._ring

    def record_ring(payload: Payload, uids: list[int], *rest: object) -> None:
        events.append(f"rang at {uids}")
        ring(payload, uids, *rest)  # type: ignore[arg-type]

    memory._ring = record_ring  # type: ignore[method-assign,assignment]
    memory._buffers = {True: HeldBuffer(), **memory._buffers}
    memory._readers_by_memory = {True: frozenset({2}), False: frozenset({1})}
    assert memory.publish(Payload({"x": torch.ones(ELEMENTS)}), [1, 2], (0, 0), 60.0) == [1]
    assert events == ["rang at [1]", "waited"]
    memory._buffers.pop(True)
    close_nodes(owner, reader, late)
