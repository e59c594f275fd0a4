"""Publish buffers in memory that a device lends: bookkeeping and order, with the host's memory in place of a GPU's.

The device's queue is played by a list: what is queued is written down, and events by their place in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Collection, Iterator

import msgpack
import pytest
import torch
from torch import Tensor

from decentnode.communication.base import Communication
from decentnode.communication.parts import Schema
from decentnode.communication.shared_memory import path
from decentnode.communication.shared_memory.cuda_ipc import EVENT_BYTES, unpack_offer
from decentnode.communication.shared_memory.device_slots import DeviceMemory, ExportedSlots, ImportedSlots
from decentnode.communication.shared_memory.layout import SLOTS, Layout
from decentnode.communication.shared_memory.path import SharedMemoryPath
from decentnode.communication.shared_memory.publish_buffer import BufferReader, PublishBuffer, buffer_path
from decentnode.communication.zeromq.generations.generation_paths import GenerationPaths
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import EnvironmentFault, PeerFault
from decentnode.payload import Payload, TensorSpec
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import flat_schema, gossip, nodes, together
from tests.communication.receive.test_exchange import reference

Said = tuple[str, int, int, int]
"""(what, owner's number, phase, slot)"""


class Fake(DeviceMemory):
    """Memory of this process, found again by a number in the offer."""

    lent: dict[int, Tensor] = {}  # noqa: RUF012
    numbers = itertools.count()

    def __init__(self, said: list[Said], refuse: bool = False) -> None:
        self.said, self.refuse = said, refuse

    def export_slots(self, layout: Layout, readers: Collection[int]) -> ExportedSlots:
        number = next(self.numbers)
        self.lent[number] = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
        return FakeLent(self, number, layout)

    def import_slots(self, offer: bytes, layout: Layout, uid: int) -> ImportedSlots:
        if self.refuse:
            raise PeerFault("no_board", "it does not want to")
        return FakeBorrowed(self, int(offer), layout)


class FakeLent(ExportedSlots):
    def __init__(self, fake: Fake, number: int, layout: Layout) -> None:
        self.fake, self.number, self.offer = fake, number, str(number).encode()
        self.slots = layout.views(fake.lent[number])

    def may_write(self, phase: int, slot: int, readers: Collection[int]) -> None:
        self.fake.said.append((f"may_write after {sorted(readers)}", self.number, phase, slot))

    def written(self, phase: int, slot: int) -> None:
        self.fake.said.append(("written", self.number, phase, slot))

    def idle(self) -> bool:
        return True


class FakeBorrowed(ImportedSlots):
    def __init__(self, fake: Fake, number: int, layout: Layout) -> None:
        self.fake, self.number = fake, number
        self.slots = layout.views(fake.lent[number])

    def enter(self, phase: int, slot: int) -> None:
        self.fake.said.append(("enter", self.number, phase, slot))

    def leave(self, phase: int, slot: int) -> None:
        self.fake.said.append(("leave", self.number, phase, slot))


LAYOUT = Layout(flat_schema(1000), 3, on_device=True)


@pytest.fixture
def said() -> Iterator[list[Said]]:
    yield []
    Fake.lent.clear()


def buffer(said: list[Said]) -> tuple[PublishBuffer, BufferReader]:
    run, fake = uuid.uuid4().hex, Fake(said)
    file = buffer_path(run, 0, on_device=True)
    own = PublishBuffer(file, LAYOUT, fake.export_slots(LAYOUT, [1]))
    try:
        return own, BufferReader(file, LAYOUT, 1, fake)
    finally:
        own.unlink()


def test_a_slot_is_written_after_its_readers_left_and_read_after_it_was_written(said: list[Said]) -> None:
    own, reader = buffer(said)
    number = int(own._exported.offer)  # type: ignore[union-attr]
    for use in range(1, 6):
        slot, told = own.publish(0, Payload({"x": torch.full((1000,), float(use))}), [1], 1e9, lambda uid: False)
        assert told == use
        reader.enter(0, slot)
        assert bool((reader.slots[0][slot][0] == use).all())
        reader.release(0, slot, use)
    for slot in range(SLOTS):
        mine = [what for what, owner, _, at in said if (owner, at) == (number, slot)]
        assert mine[:4] == ["may_write after []", "written", "enter", "leave"]
        assert mine[4:8] == ["may_write after [1]", "written", "enter", "leave"]


def test_what_nobody_read_is_left_without_a_word_to_the_device(said: list[Said]) -> None:
    """As the I/O thread does with a payload that came too late."""
    own, reader = buffer(said)
    slot, use = own.publish(0, Payload({"x": torch.ones(1000)}), [1], 1e9, lambda uid: False)
    reader.release(0, slot, use)
    assert not [what for what, *_ in said if what in ("enter", "leave")]
    own.wait_released(0, slot, 0.0, lambda uid: False)


def test_a_slot_that_is_read_is_not_written_again(said: list[Said]) -> None:
    own, reader = buffer(said)
    slots = [own.publish(0, Payload({"x": torch.ones(1000)}), [1], 1e9, lambda uid: False)[0] for _ in range(SLOTS)]
    reader.enter(0, slots[0])
    with pytest.raises(TimeoutError):
        own.publish(0, Payload({"x": torch.zeros(1000)}), [1], 0.0, lambda uid: False)
    assert bool((reader.slots[0][slots[0]][0] == 1).all())
    with pytest.raises(TimeoutError):
        own.drain(0.0, lambda uid: False)
    own.drain(0.0, lambda uid: True)


def test_lent_memory_that_is_still_read_stays(said: list[Said], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "DRAIN_SECONDS", 0.0)
    kept: list[PublishBuffer] = []
    monkeypatch.setattr(path, "_unreleased_buffers", kept)
    own, reader = buffer(said)
    slot, use = own.publish(0, Payload({"x": torch.ones(1000)}), [1], 1e9, lambda uid: False)
    reader.enter(0, slot)
    path.drain_or_keep(own, lambda uid: False)
    assert kept == [own]
    reader.release(0, slot, use)
    path.drain_or_keep(own, lambda uid: False)
    assert kept == [own]


def test_an_offer_that_has_no_room_is_refused(said: list[Said]) -> None:
    lent = Fake(said).export_slots(LAYOUT, [1])
    lent.offer = bytes(LAYOUT.size)
    path = buffer_path(uuid.uuid4().hex, 0, on_device=True)
    with pytest.raises(EnvironmentFault, match="an offer must fit in"):
        PublishBuffer(path, LAYOUT, lent)
    assert not path.exists()


def test_a_lent_board_has_no_slots_in_its_file() -> None:
    schemas = (Schema(3, {"a": TensorSpec(torch.int32, 1 << 20), "b": TensorSpec(torch.uint8, 0)}, False),)
    host, lent = Layout(schemas, 4), Layout(schemas, 4, on_device=True)
    assert host.size > 8 << 20 > 20_000 > lent.size and lent.slot_bytes >= 8 << 20
    views = lent.views(torch.zeros(lent.slot_bytes, dtype=torch.uint8))
    assert [tensor.numel() for tensor in views[0][1]] == [1 << 20, 0]
    assert len({tensor.data_ptr() for slot in views[0] for tensor in slot if tensor.numel()}) == SLOTS


def on_one_gpu(monkeypatch: pytest.MonkeyPatch, said: list[Said], gpu: dict[int, int], **options: bool) -> None:
    """As if these nodes' models lay on a GPU."""

    plain = GenerationPaths.routing
    monkeypatch.setattr(
        GenerationPaths, "routing", lambda self, seconds: dataclasses.replace(plain(self, seconds), gpu=gpu)
    )
    monkeypatch.setattr(
        "decentnode.communication.shared_memory.path.device_memory_of",
        lambda context: Fake(said, **options) if context.uid in gpu else None,
    )


def test_a_run_over_lent_memory_has_the_bits_of_every_other(
    monkeypatch: pytest.MonkeyPatch, said: list[Said]
) -> None:
    """Nodes 0 and 1 on one GPU, 2 on another, 3 on none."""
    on_one_gpu(monkeypatch, said, {0: 7, 1: 7, 2: 8})
    elements = BLOCK_ELEMENTS + 3
    with nodes("hybrid", 4, flat_schema(elements), cliques=[], edges=[]) as made:
        paths = [node.parts.paths.of(SharedMemoryPath) for node in made if isinstance(node, ZeroMQ)]
        assert [path._readers_by_memory for path in paths] == [
            {False: {2, 3}, True: {1}}, {False: {2, 3}, True: {0}}, {False: {0, 1, 3}}, {False: {0, 1, 2}},
        ]
        models = gossip(made, elements, torch.float32, 6)
        assert not any(node.counters.faults for node in made)
    assert all(torch.equal(a, b) for a, b in zip(models, reference(4, elements, torch.float32, 6), strict=True))
    assert {what for what, *_ in said} >= {"written", "enter", "leave"}


def test_payloads_are_mixed_where_the_neighbor_wrote_them(
    monkeypatch: pytest.MonkeyPatch, said: list[Said]
) -> None:
    on_one_gpu(monkeypatch, said, {0: 7, 1: 7})
    with nodes("hybrid", 2, flat_schema(1000), cliques=[], edges=[]) as made:

        def run(node: Communication) -> None:
            other = 1 - node.uid
            for r in range(5):
                x = torch.full((1000,), 10.0 * r + node.uid)
                for arrival in node.exchange(r, {other: Payload({"x": x})}, (other,)).arrivals(60):
                    got = arrival.received[other].tensors["x"]
                    assert bool((got == 10.0 * r + other).all())
                    assert any(
                        memory.data_ptr() <= got.data_ptr() < memory.data_ptr() + memory.nbytes
                        for memory in Fake.lent.values()
                    )  # fmt: skip

        together(made, run)
        assert not any(node.counters.faults for node in made)
    enters = [each for each in said if each[0] == "enter"]
    assert len(enters) == len([each for each in said if each[0] == "leave"]) == 10


def test_memory_that_cannot_be_mapped_is_gone_round(monkeypatch: pytest.MonkeyPatch, said: list[Said]) -> None:
    on_one_gpu(monkeypatch, said, {0: 7, 1: 7}, refuse=True)
    with nodes("hybrid", 2, flat_schema(1000), cliques=[], edges=[]) as made:
        models = gossip(made, 1000, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, reference(2, 1000, torch.float32, 3), strict=True))
    assert not said


HANDLE = bytes(EVENT_BYTES)
KEYS = [[0, 0], [0, 1]]
FIELDS = [bytes(64), LAYOUT.slot_bytes, 512, b"/counter", 0, HANDLE, True]
WRITTEN = [[*key, HANDLE] for key in KEYS]
LEFT = [[*key, uid, HANDLE] for key in KEYS for uid in (1, 2)]


def test_an_offer_comes_back_as_it_was() -> None:
    memory, written, left = unpack_offer(msgpack.packb([FIELDS, WRITTEN, LEFT]), LAYOUT, 2)
    assert memory == FIELDS and set(written) == set(left) == {(0, 0), (0, 1)}


@pytest.mark.parametrize("offer", [
    [], [FIELDS, WRITTEN], [FIELDS, WRITTEN, LEFT[:1]], [FIELDS, WRITTEN[:1], LEFT], [FIELDS[:3], WRITTEN, LEFT],
    [[*FIELDS[:1], LAYOUT.slot_bytes + 1, *FIELDS[2:]], WRITTEN, LEFT], [[*FIELDS[:2], -1, *FIELDS[3:]], WRITTEN, LEFT],
    [["x", *FIELDS[1:]], WRITTEN, LEFT], [FIELDS, [[0, 0, b"short"], WRITTEN[1]], LEFT], [FIELDS, 3, LEFT], 7,
])  # fmt: skip
def test_no_offer_is_believed_that_the_layout_does_not_allow(offer: object) -> None:
    with pytest.raises(ValueError):
        unpack_offer(msgpack.packb(offer), LAYOUT, 2)
