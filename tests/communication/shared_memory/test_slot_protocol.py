"""Any steps of an owner and two readers, in any order: each is given the payload that it was told of, or none."""

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
from tests.communication.shared_memory.ends import ELEMENTS, close, open_all
from tests.conftest import scale


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
