"""Slots of shared memory: nobody is given a payload other than the one that it was told of, however late it reads."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from decentnode.communication.base import Arrival
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.path import PathContext
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.staging import Leases
from decentnode.communication.routing import Routing
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_memory.layout import SLOTS
from decentnode.communication.shared_memory.model_slots import ModelSlots
from decentnode.communication.shared_memory.path import SharedMemoryPath
from decentnode.communication.shared_memory.publish_buffer import LEASED, PublishBuffer
from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import PeerFault
from decentnode.payload import Payload
from decentnode.wire.generation import FIRST
from tests.communication.contract import flat_schema
from tests.conftest import scale

RUN, ELEMENTS = b"run-id-8", 8


class End:
    """One node's end of shared memory, without sockets."""

    def __init__(
        self, uid: int, n: int, schemas: tuple[Schema, ...], folder: Path, barrier: Callable[..., object] | None = None
    ) -> None:
        self.uid, self.status, self.counters = uid, RunState(), Counters()
        self.refused: list[PeerFault] = []
        self.inbox = Inbox(schemas, 1 << 22, self.status, self.counters, lambda _uid, _size: None)
        self.leases, self.folder, self.barrier = Leases(), folder, barrier
        self.memory = SharedMemoryPath(self.context(n, schemas))
        self.model_slots = ModelSlots(schemas[0], self.leases, self.memory, self.status, Counters())
        self.model = torch.zeros(schemas[0].elements)
        self.breaks_rules = False

    def context(self, n: int, schemas: tuple[Schema, ...]) -> PathContext:
        def lose(*_: object) -> None:
            assert self.breaks_rules, "the doorbell's queue is full"

        def unused(*_: object) -> None:
            raise AssertionError("shared memory alone needs none of the others")

        machine_of = dict.fromkeys(range(n), 0)
        return PathContext(
            uid=self.uid, machine_of=machine_of, members=tuple(range(n)),
            config=ZeroMQConfig.model_validate({"name": "shared_memory"}), schemas=schemas,
            routing=Routing(machine_of, memory=True), partners=None, run_id=RUN, generation=FIRST, folder=self.folder,
            inbox=self.inbox, state=self.status, counters=self.counters, leases=self.leases,
            lease_of=lambda tensor: self.model_slots.lease(tensor), barrier=self.barrier or unused, gather=unused,  # type: ignore[arg-type]
            host_of=unused, send=lose, admit=lambda _message: None, refuse=self.refused.append,  # type: ignore[arg-type]
        )  # fmt: skip

    def send(self, round: int, uids: list[int], payload: Payload | None = None, phase: int = 0) -> list[int]:
        """Without any patience; those that were told."""
        self.model_slots.sent_to = tuple(uids)
        return self.memory.publish(payload or Payload({"x": self.model}), uids, (round, phase), 0.0)

    def mix(self) -> int | None:
        """The model moves on, as after mixing; the slot that it lives in from now on."""
        place = self.model_slots.acquire_slot(self.model, 0.0)
        assert place is not None
        self.model = place.copy_(self.model)
        slots = self.memory.model_slots
        return next((i for i, slot in enumerate(slots) if slot.data_ptr() == place.data_ptr()), None)

    def hear(self) -> None:
        assert self.memory._doorbell is not None
        for _ in range(SLOTS + 1):  # without patience it takes in one at a time
            self.memory._doorbell.listen(0.0)

    def exchange(self, round: int, sources: tuple[int, ...] = (0,)) -> InboxExchange:
        return InboxExchange(self.inbox, (round, 0), sources, frozenset())

    def slots_of(self, uid: int) -> list[list[Tensor]]:
        return self.memory._mapped[uid].slots[0]


def open_all(n: int, schemas: tuple[Schema, ...], folder: Path) -> list[End]:
    """Every node has the publish buffers of all others."""
    ends = [End(uid, n, schemas, folder) for uid in range(n)]
    for end in ends:
        end.memory.make({False: [uid for uid in range(n) if uid != end.uid]}, True)
    for end in ends:
        end.memory.map()
    for end in ends:
        end.memory.hide()
        end.memory.begin()
    return ends


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="decentnode-") as name:
        yield Path(name)


def owner_and_reader(folder: Path, schemas: tuple[Schema, ...] = flat_schema(ELEMENTS)) -> tuple[End, End]:
    owner, reader = open_all(2, schemas, folder)
    return owner, reader


def close(*ends: End) -> None:
    for end in ends:
        end.memory.close(broken=False)


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
    buffer, mapped = owner.memory._buffers[False], reader.memory._mapped[0]
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
    buffer, mapped, inbox = owner.memory._buffers[False], reader.memory._mapped[0], reader.inbox
    inbox.advance(2)
    uses = [buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [1], 0.0, lambda _uid: False) for _ in range(SLOTS)]
    kept = 1 if reason != "window_exceeded" else SLOTS
    for i in range(kept):
        inbox.put_slot(0, (2 + i, 0), *uses[i], SIZE, {}, mapped)
    slot, use = uses[-1] if kept == 1 else (uses[0][0], uses[0][1] + 10)
    with pytest.raises(PeerFault, match=reason):
        inbox.put_slot(0, (round, phase), slot, use, packed, {}, mapped)
    with pytest.raises(TimeoutError):  # still to be read
        buffer.wait_released(0, uses[0][0], 0.0, lambda _uid: False)
    if kept == 1:
        buffer.wait_released(0, uses[1][0], 0.0, lambda _uid: False)
    close(owner, reader)


def test_a_doorbell_that_comes_twice_does_not_let_go_of_what_the_first_told_of(folder: Path) -> None:
    owner, reader = owner_and_reader(folder)
    buffer, mapped = owner.memory._buffers[False], reader.memory._mapped[0]
    slot, use = buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [1], 0.0, lambda _uid: False)
    reader.inbox.put_slot(0, (0, 0), slot, use, SIZE, {}, mapped)
    for round in (0, 1 << 41):
        with pytest.raises(PeerFault):
            reader.inbox.put_slot(0, (round, 0), slot, use, SIZE if round == 0 else b"", {}, mapped)
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
            seen.append([buffer._words[buffer.layout.sequence(0, slot)] for slot in range(SLOTS)])

    slot, use = buffer.publish(0, Payload({"x": torch.ones(ELEMENTS)}), [], 0.0, lambda _uid: False)
    assert buffer._words[buffer.layout.sequence(0, slot)] == use
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


class Reading:
    """A reader's mixing under way."""

    def __init__(self, exchange: InboxExchange, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self.exchange, self.arrivals = exchange, arrivals
        self.bytes = arrival.received[0].tensors["x"]
        self.halves: list[float] = []


class Protocol(RuleBasedStateMachine):
    """An owner and two readers that take any steps in any order; waits are over at once. To be late, or frozen and
    thawed, is to take no step for a while."""

    rogue = False
    """Whether the owner writes where it likes: then the readers alone have to notice."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="decentnode-")
        self.ends = open_all(3, flat_schema(ELEMENTS), Path(self.folder.name))
        self.owner = self.ends[0]
        self.round, self.sent = 0, False
        self.may_read: set[tuple[int, int, int]] = set()
        """(reader, round, slot) that was told, and is not released."""
        self.rounds, self.reading = {1: 0, 2: 0}, dict[int, Reading]()
        self.messages: list[tuple[Tensor, float, object]] = []
        self.values: list[Tensor] = []
        """By round: what left."""
        if self.rogue:
            self.owner.breaks_rules = True
            self.owner.memory._buffers[False]._holder = lambda *_: None  # type: ignore[method-assign,assignment]

    def teardown(self) -> None:
        if hasattr(self, "ends"):
            close(*self.ends)
            self.folder.cleanup()

    # -- the owner --------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.sent)
    @rule(copied=st.booleans())
    def publish(self, copied: bool) -> None:
        """The local steps write where the model lives; then it leaves, or something else that is copied to a slot."""
        owner = self.owner
        owner.model.fill_(self.round + 1.0)
        self.values.append(-owner.model.clone() if copied else owner.model.clone())
        payload = Payload({"x": self.values[-1].clone() if copied else owner.model})
        before = self._numbers()
        told = owner.send(self.round, [1, 2], payload)
        assert bool((owner.model == self.round + 1.0).all()), "something was copied over the model"
        if told:
            (slot,) = [slot for slot, (now, then) in enumerate(zip(self._numbers(), before, strict=True)) if now > then]
            self._not_read_any_more(slot)
            self.may_read |= {(uid, self.round, slot) for uid in told}
        self.sent = True

    def _numbers(self) -> list[int]:
        buffer = self.owner.memory._buffers[False]
        return [use for use, _ in buffer._readers[0]]

    @precondition(lambda self: self.sent)
    @rule()
    def mix(self) -> None:
        slot = self.owner.mix()
        if slot is not None:
            self._not_read_any_more(slot)
        self.owner.model.fill_(-1.0)
        self.sent, self.round = False, self.round + 1

    def _not_read_any_more(self, slot: int) -> None:
        if not self.rogue:
            assert not [each for each in self.may_read if each[2] == slot], "somebody may still read it"

    @rule()
    def lease(self) -> None:
        lease = self.owner.model_slots.lease(self.owner.model) if self.sent else None
        if lease is not None:
            self.messages.append((self.owner.model, float(self.owner.model[0]), lease))

    @precondition(lambda self: bool(self.messages))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self.messages.pop(data.draw(st.integers(0, len(self.messages) - 1)))

    # -- a reader ---------------------------------------------------------------------------------------------

    @rule(uid=st.sampled_from([1, 2]))
    def hear(self, uid: int) -> None:
        """Of rounds that are over for the reader nothing is read any more."""
        self.ends[uid].hear()
        self.may_read -= {each for each in self.may_read if each[0] == uid and each[1] < self.rounds[uid]}

    @rule(uid=st.sampled_from([1, 2]))
    def start_reading(self, uid: int) -> None:
        if uid in self.reading or self.rounds[uid] > self.round:
            return
        exchange = self.ends[uid].exchange(self.rounds[uid])
        arrivals = exchange.arrivals(0.0)
        arrival = next(arrivals)
        if arrival.received:
            self.reading[uid] = Reading(exchange, arrival, arrivals)
        else:
            self._end(uid, arrivals)

    @rule(uid=st.sampled_from([1, 2]))
    def read_on(self, uid: int) -> None:
        reading = self.reading.get(uid)
        if reading is None:
            return
        if len(reading.halves) < 2:
            part = reading.bytes[:1] if not reading.halves else reading.bytes[-1:]
            reading.halves.append(float(part))
            return
        if not reading.exchange.spoiled():
            sent = float(self.values[self.rounds[uid]][0])
            assert reading.halves == [sent, sent], "kept what it was not told of"
        else:
            assert self.rogue, "an owner that keeps to the rules spoils nothing"
        self.reading.pop(uid)
        self._end(uid, reading.arrivals)

    def _end(self, uid: int, arrivals: Iterator[Arrival]) -> None:
        assert not list(arrivals)
        self.rounds[uid] += 1
        self.ends[uid].inbox.advance(self.rounds[uid])
        self.hear(uid)

    @invariant()
    def messages_are_as_they_were(self) -> None:
        for sent, value, _ in getattr(self, "messages", ()):
            assert self.rogue or bool((sent == value).all()), "bytes of a message that is not acknowledged changed"


class RogueProtocol(Protocol):
    rogue = True


LIMITS = settings(max_examples=scale(30, 2000), stateful_step_count=60, deadline=None)
TestProtocol = Protocol.TestCase
TestProtocol.settings = LIMITS
TestRogueProtocol = RogueProtocol.TestCase
TestRogueProtocol.settings = LIMITS


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
    memory._read_by = {True: frozenset({2}), False: frozenset({1})}
    assert memory.publish(Payload({"x": torch.ones(ELEMENTS)}), [1, 2], (0, 0), 60.0) == [1]
    assert happened == ["rang at [1]", "waited"]
    memory._buffers.pop(True)
    close(owner, reader, held)
