"""The slot protocol under random steps of an owner and two readers: a reader gets the payload of which it was notified,
or none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from decentnode.communication.base import Arrival
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.payload import Payload
from tests.communication.contract import flat_schema
from tests.communication.shared_memory.memory_nodes import ELEMENTS, close_nodes, open_nodes
from tests.conftest import scale


class ReadInProgress:
    """A payload that a reader is mixing, in two halves."""

    def __init__(self, exchange: InboxExchange, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self.exchange, self.arrivals = exchange, arrivals
        self.bytes = arrival.received[0].tensors["x"]
        self.halves: list[float] = []


class Protocol(RuleBasedStateMachine):
    """An owner and two readers that make random steps; waits end at once. A node that makes no steps for a while is one
    that is late, or was frozen."""

    owner_is_faulty = False
    """Whether the owner writes into slots that are still read: readers have to detect that."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="decentnode-")
        self.nodes = open_nodes(3, flat_schema(ELEMENTS), Path(self.folder.name))
        self.owner = self.nodes[0]
        self.round, self.sent = 0, False
        self.readable: set[tuple[int, int, int]] = set()
        """(reader, round, slot) of every notification whose slot the reader has not released."""
        self.rounds, self.reading = {1: 0, 2: 0}, dict[int, ReadInProgress]()
        self.messages: list[tuple[Tensor, float, object]] = []
        self.values: list[Tensor] = []
        """By round: the published payload."""
        if self.owner_is_faulty:
            self.owner.may_lose_doorbells = True
            self.owner.memory._buffers[False]._holder = lambda *_: None  # type: ignore[method-assign,assignment]

    def teardown(self) -> None:
        if hasattr(self, "nodes"):
            close_nodes(*self.nodes)
            self.folder.cleanup()

    # -- the owner --------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.sent)
    @rule(copied=st.booleans())
    def publish(self, copied: bool) -> None:
        """Makes a local step in place, and publishes the model, or (copied) another tensor that is copied to a slot."""
        owner = self.owner
        owner.model.fill_(self.round + 1.0)
        self.values.append(-owner.model.clone() if copied else owner.model.clone())
        payload = Payload({"x": self.values[-1].clone() if copied else owner.model})
        before = self._uses()
        notified = owner.send(self.round, [1, 2], payload)
        assert bool((owner.model == self.round + 1.0).all()), "something was copied over the model"
        if notified:
            (slot,) = [slot for slot, (now, then) in enumerate(zip(self._uses(), before, strict=True)) if now > then]
            self._check_unread(slot)
            self.readable |= {(uid, self.round, slot) for uid in notified}
        self.sent = True

    def _uses(self) -> list[int]:
        """Returns how often each slot has been used."""
        buffer = self.owner.memory._buffers[False]
        return [use for use, _ in buffer._readers[0]]

    @precondition(lambda self: self.sent)
    @rule()
    def mix(self) -> None:
        slot = self.owner.move_model()
        if slot is not None:
            self._check_unread(slot)
        self.owner.model.fill_(-1.0)
        self.sent, self.round = False, self.round + 1

    def _check_unread(self, slot: int) -> None:
        if not self.owner_is_faulty:
            assert not any(slot == readable for _, _, readable in self.readable), "a reader may still read the slot"

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
    def receive_doorbells(self, uid: int) -> None:
        """A reader that receives doorbells of earlier rounds releases their slots."""
        self.nodes[uid].receive_doorbells()
        self.readable -= {key for key in self.readable if key[0] == uid and key[1] < self.rounds[uid]}

    @rule(uid=st.sampled_from([1, 2]))
    def start_reading(self, uid: int) -> None:
        if uid in self.reading or self.rounds[uid] > self.round:
            return
        exchange = self.nodes[uid].exchange(self.rounds[uid])
        arrivals = exchange.arrivals(0.0)
        arrival = next(arrivals)
        if arrival.received:
            self.reading[uid] = ReadInProgress(exchange, arrival, arrivals)
        else:
            self._end_round(uid, arrivals)

    @rule(uid=st.sampled_from([1, 2]))
    def continue_reading(self, uid: int) -> None:
        """Reads the next half; after both, checks them and ends the round."""
        reading = self.reading.get(uid)
        if reading is None:
            return
        if len(reading.halves) < 2:
            part = reading.bytes[:1] if not reading.halves else reading.bytes[-1:]
            reading.halves.append(float(part))
            return
        if not reading.exchange.spoiled():
            sent = float(self.values[self.rounds[uid]][0])
            assert reading.halves == [sent, sent], "the reader kept another payload"
        else:
            assert self.owner_is_faulty, "a correct owner never overwrites what is read"
        self.reading.pop(uid)
        self._end_round(uid, reading.arrivals)

    def _end_round(self, uid: int, arrivals: Iterator[Arrival]) -> None:
        assert not list(arrivals)
        self.rounds[uid] += 1
        self.nodes[uid].inbox.advance(self.rounds[uid])
        self.receive_doorbells(uid)

    @invariant()
    def unacknowledged_messages_are_unchanged(self) -> None:
        for sent, value, _ in getattr(self, "messages", ()):
            assert self.owner_is_faulty or bool((sent == value).all()), "an unacknowledged message changed"


class FaultyOwnerProtocol(Protocol):
    owner_is_faulty = True


SETTINGS = settings(max_examples=scale(30, 2000), stateful_step_count=60, deadline=None)
TestProtocol = Protocol.TestCase
TestProtocol.settings = SETTINGS
TestFaultyOwnerProtocol = FaultyOwnerProtocol.TestCase
TestFaultyOwnerProtocol.settings = SETTINGS
