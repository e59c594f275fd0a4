"""Rounds of exchanges over real links, inboxes and exchanges on a virtual network: one thread, one event heap.

Every node is a generator that yields whatever it waits for. It goes on when its inbox says so, or at the deadline that
the wait names; nothing else ever looks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.parts import Schema
from decentnode.communication.receive import chunking
from decentnode.communication.receive.arrival_wait import ArrivalWait
from decentnode.communication.receive.chunking import MESSAGE_COST, to_bytes
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox_state import InboxState
from decentnode.communication.run_state import RunFacts
from decentnode.communication.zeromq.protocol.link_state import MAX_PAYLOADS, QueuedMessage
from decentnode.communication.zeromq.protocol.room_wait import RoomWait
from decentnode.payload import TensorSpec
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.wire import codec, framing
from decentnode.wire.messages import Chunk, Message, Overdue, Skipped, Waits
from tests.communication.virtual_links import RUN, End, drawn_link, plan_breaks
from tests.conftest import scale

SEEDS, PER_CASE = scale(100, 10_000), scale(50, 500)
ELEMENTS, CHUNK_BYTES, ROUNDS = 600, 1024, 6
WINDOW = 4 * (CHUNK_BYTES + MESSAGE_COST)
FAULTY_SECONDS, SETTLE_SECONDS, FOREVER = 3.0, 120.0, 1e9
TIMEOUT_SECONDS = 20.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload is a few chunks of 256 elements."""
    monkeypatch.setattr(chunking, "BLOCK_ELEMENTS", 16)


def schemas() -> tuple[Schema, ...]:
    """Two phases: slices are mixed as they come, and whole payloads."""
    spec = {"x": TensorSpec(torch.float32, ELEMENTS)}
    return Schema(ELEMENTS, spec, True), Schema(ELEMENTS, spec, False)


def values(uid: int, round: int, phase: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1000 * round + 10 * uid + phase))


class RoundEnd(End):
    """A node that exchanges with all others in every round."""

    timeout_seconds = FOREVER

    def __init__(self, uid: int, n: int, network: VirtualNetwork, secure: bool) -> None:
        super().__init__(uid, n, network, WINDOW, secure)
        self.inbox = InboxState(schemas(), CHUNK_BYTES, RunFacts(), self.counters, self)
        self.rounds_over, self.dead = 0, False
        self.missing: set[int] = set()
        self.withheld = 0
        self._wait: ArrivalWait | RoomWait | None = None
        self._story = self._rounds()

    def begin(self) -> None:
        """With `others` known: the first round starts."""
        self._go_on()

    def _rounds(self) -> Iterator[ArrivalWait | RoomWait]:
        for round in range(ROUNDS):
            self.inbox.advance(round)
            for phase in (0, 1):
                yield from self._send((round, phase))
                sources = tuple(other.uid for other in self.others)
                exchange = InboxExchange(self.inbox, (round, phase), sources, frozenset(sources))
                got: dict[int, list[Tensor]] = {}
                for step in exchange.steps(self.timeout_seconds):
                    if isinstance(step, ArrivalWait):
                        yield step
                    else:
                        for source, payload in step.received.items():
                            got.setdefault(source, []).append(payload.tensors["x"].clone())
                self.missing |= exchange.missing
                for source in set(sources) - exchange.missing:
                    assert torch.equal(torch.cat(got[source]), values(source, round, phase)), "bit for bit"
            self.rounds_over += 1

    def _send(self, key: tuple[int, int]) -> Iterator[RoomWait]:
        (round, phase), takes = key, []
        raw, (plan,) = to_bytes(values(self.uid, round, phase)), self.inbox.plans[phase]
        for uid in [other.uid for other in self.others]:
            wait = RoomWait(self.links.sender, self.inbox.facts, self.counters, uid=uid, key=key,
                            timeout_seconds=self.timeout_seconds, now=self.heap.now)  # fmt: skip
            yield wait
            if wait.verdict == "send":
                takes.append(uid)
            else:
                assert wait.verdict == "withhold"
                self.withheld += 1
                self.links.sender.withhold(uid, key, self.heap.now)
        for chunk in range(plan.count(ELEMENTS)):
            start, stop = plan.bounds(chunk, ELEMENTS)
            header = codec.encode(Chunk(RUN, 0, self.uid, round, phase, 0, chunk, ELEMENTS, {}))
            last = chunk + 1 == plan.count(ELEMENTS)
            message = QueuedMessage.bulk(header, raw[4 * start : 4 * stop], framing.XXH3, last=last)
            for uid in takes:
                self.links.sender.bulk(uid, message, self.heap.now)
        self._arm()

    # -- the ports --------------------------------------------------------------------------------------------

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        if isinstance(message, Skipped):
            first, last = (message.round, message.phase), (message.last_round, message.last_phase)
            self.inbox.skip(message.source, first, last)
            return
        if isinstance(message, Overdue):
            if self.inbox.facts.waiting is not None:
                self._say(message.source, Waits)
            return
        if isinstance(message, Waits):
            self.inbox.note_waiting_report(message.source, now)
            return
        assert isinstance(message, Chunk) and body is not None
        self.held[message.source] += body.nbytes + MESSAGE_COST
        assert self.held[message.source] <= WINDOW
        self.inbox.put(message, body, now)

    def has_room(self, uid: int) -> None:
        self.inbox.facts.silent.discard(uid)
        self.ready()

    def ask(self, uids: list[int]) -> None:
        for uid in uids:
            self._say(uid, Overdue)

    def _say(self, uid: int, kind: type[Message]) -> None:
        self.links.sender.control(uid, self.links.sender.message(kind), self.heap.now)
        self._arm()

    def ready(self) -> None:
        self.heap.after(0.0, self._go_on)

    # -- what drives it ---------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        while not self.dead:
            if self._wait is not None and not self._wait.step(self.heap.now):
                self._look_again(self._wait, self._wait.deadline)
                return
            self._wait = next(self._story, None)
            if self._wait is None:
                return

    def _look_again(self, wait: ArrivalWait | RoomWait, due: float) -> None:
        def look() -> None:
            if self._wait is wait and wait.deadline == due:
                self._go_on()

        assert due > self.heap.now
        self.heap.at(due, look)

    def _check(self) -> None:
        super()._check()
        assert all(edge.queued <= MAX_PAYLOADS for edge in self.links.sender.edges.values())


def ends_of(
    seed: int, n: int, timeout_seconds: float, breaks: bool = True
) -> tuple[random.Random, VirtualNetwork, list[RoundEnd]]:
    draw = random.Random(seed)
    network = VirtualNetwork(EventQueue(), drawn_link(draw), seed)
    secure = draw.random() < 0.1
    ends = [RoundEnd(uid, n, network, secure) for uid in range(n)]
    for end in ends:
        end.others, end.timeout_seconds = [other for other in ends if other is not end], timeout_seconds
        network.heap.after(draw.random(), end.begin)
    if breaks:
        plan_breaks(ends, draw, FAULTY_SECONDS)
    return draw, network, ends


def rounds_of(seed: int) -> Counter[str]:
    """Whatever breaks, every round has every payload."""
    _, network, ends = ends_of(seed, 2 + 2 * (seed % 2), FOREVER)
    heap = network.heap
    with clock.use(heap.clock):
        heap.run(lambda: False, FAULTY_SECONDS)
        network.faulty = False
        assert heap.run(lambda: all(end.rounds_over == ROUNDS for end in ends), FAULTY_SECONDS + SETTLE_SECONDS)
        for end in ends:
            assert not end.missing and not end.inbox.incoming and not +end.held
            assert "window_exceeded" not in end.counters.faults and "duplicate_chunk" not in end.counters.faults
    return network.happened


@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
@pytest.mark.slow
def test_rounds_have_all_payloads_bit_for_bit(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + PER_CASE):
        try:
            happened += rounds_of(seed)
        except BaseException as error:
            error.add_note(f"rounds_of({seed})")
            raise
    assert all(happened[what] for what in ("lost", "refused", "cut"))


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(scale(10, 500)))
def test_a_node_that_dies_costs_a_round_one_time_out(seed: int) -> None:
    breaks = seed % 2 == 1
    draw, network, ends = ends_of(seed, 4, TIMEOUT_SECONDS, breaks)
    heap, victim = network.heap, ends[draw.randrange(4)]
    network.faulty = False

    def die() -> None:
        victim.dead = True
        network.dead.add(victim.uid)

    heap.at(draw.random() * FAULTY_SECONDS, die)
    with clock.use(heap.clock):
        others = [end for end in ends if end is not victim]
        limit = FAULTY_SECONDS + SETTLE_SECONDS + ROUNDS * TIMEOUT_SECONDS
        assert heap.run(lambda: all(end.rounds_over == ROUNDS for end in others), limit)
        for end in others:
            # A connection that dies in silence meanwhile may cost its other end, too, until another is made.
            assert breaks or end.missing <= {victim.uid}
            waited = end.counters.edge(victim.uid).wait_seconds
            assert waited <= (ROUNDS + 1) * TIMEOUT_SECONDS
