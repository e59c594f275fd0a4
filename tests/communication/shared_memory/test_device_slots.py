"""Publish buffers in the memory of a device, with host memory in place of a GPU's.

A list stands in for the device's queue: it records the operations in the order in which they would be enqueued.
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
from decentnode.wire.generation import Limits
from tests.communication.contract import flat_schema, gossip, open_nodes, run_on_all
from tests.communication.receive.test_exchange import reference_models
from tests.conftest import wait_until

Call = tuple[str, int, int, int]
"""(operation, number of the owner's export, phase, slot)"""


class FakeDeviceMemory(DeviceMemory):
    """Exports memory of this process; the offer is its number in `exported`."""

    exported: dict[int, Tensor] = {}  # noqa: RUF012
    numbers = itertools.count()

    def __init__(self, calls: list[Call], refuse: bool = False) -> None:
        self.calls, self.refuse = calls, refuse

    def export_slots(self, layout: Layout, readers: Collection[int]) -> ExportedSlots:
        number = next(self.numbers)
        self.exported[number] = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
        return FakeExportedSlots(self, number, layout)

    def import_slots(self, offer: bytes, layout: Layout, uid: int) -> ImportedSlots:
        if self.refuse:
            raise PeerFault("no_board", "refused by the test")
        return FakeImportedSlots(self, int(offer), layout)


class FakeExportedSlots(ExportedSlots):
    def __init__(self, fake: FakeDeviceMemory, number: int, layout: Layout) -> None:
        self.fake, self.number, self.offer = fake, number, str(number).encode()
        self.slots = layout.views(fake.exported[number])

    def may_write(self, phase: int, slot: int, readers: Collection[int]) -> None:
        self.fake.calls.append((f"may_write after {sorted(readers)}", self.number, phase, slot))

    def written(self, phase: int, slot: int) -> None:
        self.fake.calls.append(("written", self.number, phase, slot))

    def idle(self) -> bool:
        return True


class FakeImportedSlots(ImportedSlots):
    def __init__(self, fake: FakeDeviceMemory, number: int, layout: Layout) -> None:
        self.fake, self.number = fake, number
        self.slots = layout.views(fake.exported[number])

    def enter(self, phase: int, slot: int) -> None:
        self.fake.calls.append(("enter", self.number, phase, slot))

    def leave(self, phase: int, slot: int) -> None:
        self.fake.calls.append(("leave", self.number, phase, slot))


LAYOUT = Layout(flat_schema(1000), 3, on_device=True)


@pytest.fixture
def calls() -> Iterator[list[Call]]:
    yield []
    FakeDeviceMemory.exported.clear()


def open_buffer(calls: list[Call]) -> tuple[PublishBuffer, BufferReader]:
    run, fake = uuid.uuid4().hex, FakeDeviceMemory(calls)
    file = buffer_path(run, 0, on_device=True)
    own = PublishBuffer(file, LAYOUT, fake.export_slots(LAYOUT, [1]))
    try:
        return own, BufferReader(file, LAYOUT, 1, fake)
    finally:
        own.unlink()


def test_a_slot_is_written_after_its_readers_left_and_read_after_it_was_written(calls: list[Call]) -> None:
    own, reader = open_buffer(calls)
    number = int(own._exported.offer)  # type: ignore[union-attr]
    for use in range(1, 6):
        payload = Payload({"x": torch.full((1000,), float(use))})
        slot, published_use = own.publish(0, payload, [1], 1e9, lambda uid: False)
        assert published_use == use
        reader.enter(0, slot)
        assert bool((reader.slots[0][slot][0] == use).all())
        reader.release(0, slot, use)
    for slot in range(SLOTS):
        operations = [what for what, owner, _, at in calls if (owner, at) == (number, slot)]
        assert operations[:4] == ["may_write after []", "written", "enter", "leave"]
        assert operations[4:8] == ["may_write after [1]", "written", "enter", "leave"]


def test_a_slot_that_was_never_read_is_released_without_a_device_operation(calls: list[Call]) -> None:
    """The I/O thread releases payloads that arrive too late."""
    own, reader = open_buffer(calls)
    slot, use = own.publish(0, Payload({"x": torch.ones(1000)}), [1], 1e9, lambda uid: False)
    reader.release(0, slot, use)
    assert not [what for what, *_ in calls if what in ("enter", "leave")]
    own.wait_released(0, slot, 0.0, lambda uid: False)


def test_a_slot_is_not_written_while_it_is_read(calls: list[Call]) -> None:
    own, reader = open_buffer(calls)
    slots = [own.publish(0, Payload({"x": torch.ones(1000)}), [1], 1e9, lambda uid: False)[0] for _ in range(SLOTS)]
    reader.enter(0, slots[0])
    with pytest.raises(TimeoutError):
        own.publish(0, Payload({"x": torch.zeros(1000)}), [1], 0.0, lambda uid: False)
    assert bool((reader.slots[0][slots[0]][0] == 1).all())
    with pytest.raises(TimeoutError):
        own.drain(0.0, lambda uid: False)
    own.drain(0.0, lambda uid: True)


def test_a_buffer_that_is_still_read_is_kept_when_it_cannot_be_drained(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[int, list[PublishBuffer]] = {}
    monkeypatch.setattr(path, "_unreleased_buffers", kept)
    own, reader = open_buffer(calls)
    slot, _ = own.publish(0, Payload({"x": torch.ones(1000)}), [1], 1e9, lambda uid: False)
    reader.enter(0, slot)
    path.drain_or_keep(0, own, 0.0, lambda uid: False)
    path.drain_kept(1)
    assert kept == {0: [own]}
    monkeypatch.setattr(own._exported, "idle", lambda: False)
    monkeypatch.setattr(path, "DRAIN_SECONDS", 0.0)
    path.drain_kept(0)
    assert kept == {0: [own]}, "the device still reads it"
    monkeypatch.undo()
    monkeypatch.setattr(path, "_unreleased_buffers", kept)
    path.drain_kept(0)
    assert not kept


def test_a_regrouped_node_keeps_no_memory_for_readers_that_died_or_continue(
    monkeypatch: pytest.MonkeyPatch, calls: list[Call]
) -> None:
    """Node 2 dies before it has read what the others lent it, and the others have not read everything either."""
    monkeypatch.setattr(path, "_unreleased_buffers", {})
    simulate_gpus(monkeypatch, calls, dict.fromkeys(range(3), 7))
    with open_nodes("hybrid", 3, flat_schema(1000), limits=Limits(5.0, 60.0, 2), cliques=[], edges=[]) as nodes:
        payload = Payload({"x": torch.ones(1000)})
        for node in nodes:
            others = tuple({0, 1, 2} - {node.uid})
            node.exchange(0, dict.fromkeys(others, payload), others)
        (*survivors, dead) = (node for node in nodes if isinstance(node, ZeroMQ))
        dead._links.goodbye = lambda _now: None  # type: ignore[method-assign]
        dead._closed = True
        dead._io.close(0.0)
        survivors[0].suspect([2], "it died")
        kept_while_regrouping: dict[int, list[PublishBuffer]] = {}

        def enter_next_generation(node: Communication) -> None:
            assert isinstance(node, ZeroMQ)
            wait_until(lambda: bool(node._run_state.regrouping))
            original = node._inbox.reset
            monkeypatch.setattr(node._inbox, "reset", lambda round: (
                kept_while_regrouping.update(path._unreleased_buffers), original(round)))
            assert node.regroup().wait().members == (0, 1)
            node.barrier("without it", 30)

        run_on_all(survivors, enter_next_generation)
        assert kept_while_regrouping.keys() == {0, 1} and not path._unreleased_buffers


def test_an_offer_that_does_not_fit_into_the_header_is_refused(calls: list[Call]) -> None:
    exported = FakeDeviceMemory(calls).export_slots(LAYOUT, [1])
    exported.offer = bytes(LAYOUT.size)
    path = buffer_path(uuid.uuid4().hex, 0, on_device=True)
    with pytest.raises(EnvironmentFault, match="an offer must fit in"):
        PublishBuffer(path, LAYOUT, exported)
    assert not path.exists()


def test_the_file_of_a_device_buffer_contains_no_slots() -> None:
    schemas = (Schema(3, {"a": TensorSpec(torch.int32, 1 << 20), "b": TensorSpec(torch.uint8, 0)}, False),)
    host, exported = Layout(schemas, 4), Layout(schemas, 4, on_device=True)
    assert host.size > 8 << 20 > 20_000 > exported.size and exported.slot_bytes >= 8 << 20
    views = exported.views(torch.zeros(exported.slot_bytes, dtype=torch.uint8))
    assert [tensor.numel() for tensor in views[0][1]] == [1 << 20, 0]
    assert len({tensor.data_ptr() for slot in views[0] for tensor in slot if tensor.numel()}) == SLOTS


def simulate_gpus(monkeypatch: pytest.MonkeyPatch, calls: list[Call], gpu: dict[int, int], **options: bool) -> None:
    """Makes nodes believe that their models are on GPUs. gpu: uid -> number of its GPU."""
    original = GenerationPaths.routing
    monkeypatch.setattr(
        GenerationPaths, "routing", lambda self, seconds: dataclasses.replace(original(self, seconds), gpu=gpu)
    )
    monkeypatch.setattr(
        "decentnode.communication.shared_memory.path.device_memory_of",
        lambda context: FakeDeviceMemory(calls, **options) if context.uid in gpu else None,
    )


def test_gossip_over_device_memory_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, calls: list[Call]
) -> None:
    """Nodes 0 and 1 are on one GPU, node 2 is on another, and node 3 on none."""
    simulate_gpus(monkeypatch, calls, {0: 7, 1: 7, 2: 8})
    elements = BLOCK_ELEMENTS + 3
    with open_nodes("hybrid", 4, flat_schema(elements), cliques=[], edges=[]) as nodes:
        paths = [node.parts.paths.of(SharedMemoryPath) for node in nodes if isinstance(node, ZeroMQ)]
        assert [path._readers_by_memory for path in paths] == [
            {False: {2, 3}, True: {1}}, {False: {2, 3}, True: {0}}, {False: {0, 1, 3}}, {False: {0, 1, 2}},
        ]
        models = gossip(nodes, elements, torch.float32, 6)
        assert not any(node.counters.faults for node in nodes)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(4, elements, torch.float32, 6), strict=True))
    assert {what for what, *_ in calls} >= {"written", "enter", "leave"}


def test_payloads_are_read_in_place_from_the_neighbors_device_memory(
    monkeypatch: pytest.MonkeyPatch, calls: list[Call]
) -> None:
    simulate_gpus(monkeypatch, calls, {0: 7, 1: 7})
    with open_nodes("hybrid", 2, flat_schema(1000), cliques=[], edges=[]) as nodes:

        def run(node: Communication) -> None:
            other = 1 - node.uid
            for r in range(5):
                x = torch.full((1000,), 10.0 * r + node.uid)
                for arrival in node.exchange(r, {other: Payload({"x": x})}, (other,)).arrivals(60):
                    received = arrival.received[other].tensors["x"]
                    assert bool((received == 10.0 * r + other).all())
                    assert any(
                        memory.data_ptr() <= received.data_ptr() < memory.data_ptr() + memory.nbytes
                        for memory in FakeDeviceMemory.exported.values()
                    )  # fmt: skip

        run_on_all(nodes, run)
        assert not any(node.counters.faults for node in nodes)
    operations = [what for what, *_ in calls]
    assert operations.count("enter") == operations.count("leave") == 10


def test_nodes_whose_device_memory_cannot_be_mapped_use_another_path(
    monkeypatch: pytest.MonkeyPatch, calls: list[Call]
) -> None:
    simulate_gpus(monkeypatch, calls, {0: 7, 1: 7}, refuse=True)
    with open_nodes("hybrid", 2, flat_schema(1000), cliques=[], edges=[]) as nodes:
        models = gossip(nodes, 1000, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(2, 1000, torch.float32, 3), strict=True))
    assert not calls


HANDLE = bytes(EVENT_BYTES)
KEYS = [[0, 0], [0, 1]]
FIELDS = [bytes(64), LAYOUT.slot_bytes, 512, b"/counter", 0, HANDLE, True]
WRITTEN = [[*key, HANDLE] for key in KEYS]
LEFT = [[*key, uid, HANDLE] for key in KEYS for uid in (1, 2)]


def test_a_valid_offer_is_unpacked_unchanged() -> None:
    memory, written, left = unpack_offer(msgpack.packb([FIELDS, WRITTEN, LEFT]), LAYOUT, 2)
    assert memory == FIELDS and set(written) == set(left) == {(0, 0), (0, 1)}


@pytest.mark.parametrize("offer", [
    [], [FIELDS, WRITTEN], [FIELDS, WRITTEN, LEFT[:1]], [FIELDS, WRITTEN[:1], LEFT], [FIELDS[:3], WRITTEN, LEFT],
    [[*FIELDS[:1], LAYOUT.slot_bytes + 1, *FIELDS[2:]], WRITTEN, LEFT], [[*FIELDS[:2], -1, *FIELDS[3:]], WRITTEN, LEFT],
    [["x", *FIELDS[1:]], WRITTEN, LEFT], [FIELDS, [[0, 0, b"short"], WRITTEN[1]], LEFT], [FIELDS, 3, LEFT], 7,
])  # fmt: skip
def test_an_offer_that_does_not_match_the_layout_is_refused(offer: object) -> None:
    with pytest.raises(ValueError):
        unpack_offer(msgpack.packb(offer), LAYOUT, 2)
