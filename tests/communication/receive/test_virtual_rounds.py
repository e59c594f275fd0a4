"""Rounds of exchanges with real links and inboxes on a virtual network, in one thread.

Every node is a generator that yields its waits. It continues only when its inbox reports a change, or at the deadline
that the wait names.
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
from tests.communication.virtual_links import RUN, VirtualNode, count_faults, draw_link, schedule_breaks
from tests.conftest import scale

SEEDS, PER_CASE = scale(100, 10_000), scale(50, 500)
ELEMENTS, CHUNK_BYTES, ROUNDS = 600, 1024, 6
WINDOW = 4 * (CHUNK_BYTES + MESSAGE_COST)
FAULTY_SECONDS, SETTLE_SECONDS, FOREVER = 3.0, 120.0, 1e9
TIMEOUT_SECONDS = 20.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a payload consist of a few chunks of 256 elements."""
    monkeypatch.setattr(chunking, "BLOCK_ELEMENTS", 16)


def schemas() -> tuple[Schema, ...]:
    """Returns the schemas of two phases: payloads that are mixed slice by slice, and as a whole."""
    spec = {"x": TensorSpec(torch.float32, ELEMENTS)}
    return Schema(ELEMENTS, spec, True), Schema(ELEMENTS, spec, False)


def model_of(uid: int, round: int, phase: int) -> Tensor:
    """Returns what node `uid` sends in this round and phase."""
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1000 * round + 10 * uid + phase))


class RoundsNode(VirtualNode):
    """A node that exchanges with all others in every round."""

    timeout_seconds = FOREVER

    def __init__(self, uid: int, n: int, network: VirtualNetwork, secure: bool) -> None:
        super().__init__(uid, n, network, WINDOW, secure)
        self.inbox = InboxState(schemas(), CHUNK_BYTES, RunFacts(), self.counters, self)
        self.rounds_completed, self.dead = 0, False
        self.missing: set[int] = set()
        self.withheld = 0
        self._steps = self._rounds()

    def begin(self) -> None:
        """Starts the first round; `others` must be set."""
        self._advance()

    def _rounds(self) -> Iterator[ArrivalWait | RoomWait]:
        for round in range(ROUNDS):
            self.inbox.advance(round)
            for phase in (0, 1):
                yield from self._send((round, phase))
                sources = tuple(other.uid for other in self.others)
                exchange = InboxExchange(self.inbox, (round, phase), sources, frozenset(sources))
                slices: dict[int, list[Tensor]] = {}
                for step in exchange.steps(self.timeout_seconds):
                    if isinstance(step, ArrivalWait):
                        yield step
                    else:
                        for source, payload in step.received.items():
                            slices.setdefault(source, []).append(payload.tensors["x"].clone())
                self.missing |= exchange.missing
                for source in set(sources) - exchange.missing:
                    assert torch.equal(torch.cat(slices[source]), model_of(source, round, phase)), "other bits arrived"
            self.rounds_completed += 1

    def _send(self, key: tuple[int, int]) -> Iterator[RoomWait]:
        (round, phase), receivers = key, []
        raw, (plan,) = to_bytes(model_of(self.uid, round, phase)), self.inbox.plans[phase]
        for uid in [other.uid for other in self.others]:
            wait = RoomWait(self.links.sender, self.inbox.facts, self.counters, uid=uid, key=key,
                            timeout_seconds=self.timeout_seconds, now=self.heap.now)  # fmt: skip
            yield wait
            if wait.verdict == "send":
                receivers.append(uid)
            else:
                assert wait.verdict == "withhold"
                self.withheld += 1
                self.links.sender.withhold(uid, key, self.heap.now)
        for chunk in range(plan.count(ELEMENTS)):
            start, stop = plan.bounds(chunk, ELEMENTS)
            header = codec.encode(Chunk(RUN, 0, self.uid, round, phase, 0, chunk, ELEMENTS, {}))
            last = chunk + 1 == plan.count(ELEMENTS)
            message = QueuedMessage.bulk(header, raw[4 * start : 4 * stop], framing.XXH3, last=last)
            for uid in receivers:
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
                self._send_control(message.source, Waits)
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
            self._send_control(uid, Overdue)

    def _send_control(self, uid: int, kind: type[Message]) -> None:
        self.links.sender.control(uid, self.links.sender.message(kind), self.heap.now)
        self._arm()

    def ready(self) -> None:
        self.heap.after(0.0, self._advance)

    # -- calls of the network and the event queue -------------------------------------------------------------

    def _advance(self) -> None:
        while not self.dead:
            if self._wait is not None and not self._wait.step(self.heap.now):
                self._step_at(self._wait, self._wait.deadline)
                return
            self._wait = next(self._steps, None)
            if self._wait is None:
                return

    def _check(self) -> None:
        super()._check()
        assert all(edge.queued <= MAX_PAYLOADS for edge in self.links.sender.edges.values())


def make_nodes(
    seed: int, n: int, timeout_seconds: float, breaks: bool = True
) -> tuple[random.Random, VirtualNetwork, list[RoundsNode]]:
    draw = random.Random(seed)
    network = VirtualNetwork(EventQueue(), draw_link(draw), seed)
    secure = draw.random() < 0.1
    nodes = [RoundsNode(uid, n, network, secure) for uid in range(n)]
    for node in nodes:
        node.others, node.timeout_seconds = [other for other in nodes if other is not node], timeout_seconds
        network.heap.after(draw.random(), node.begin)
    if breaks:
        schedule_breaks(nodes, draw, FAULTY_SECONDS)
    return draw, network, nodes


def run_rounds_with_faults(seed: int) -> Counter[str]:
    """Makes rounds with random faults and checks that every node gets every payload. Returns how often each fault
    happened."""
    _, network, nodes = make_nodes(seed, 2 + 2 * (seed % 2), FOREVER)
    heap = network.heap
    with clock.use(heap.clock):
        heap.run(lambda: False, FAULTY_SECONDS)
        network.faulty = False
        assert heap.run(lambda: all(node.rounds_completed == ROUNDS for node in nodes), FAULTY_SECONDS + SETTLE_SECONDS)
        for node in nodes:
            assert not node.missing and not node.inbox.incoming and not +node.held
            assert "window_exceeded" not in node.counters.faults and "duplicate_chunk" not in node.counters.faults
    return network.happened


@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
@pytest.mark.slow
def test_every_payload_of_every_round_arrives_unchanged_despite_faults(first: int) -> None:
    happened = count_faults(run_rounds_with_faults, range(first, first + PER_CASE))
    assert all(happened[what] for what in ("lost", "refused", "cut"))


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(scale(10, 500)))
def test_a_dead_node_costs_each_round_at_most_one_time_out(seed: int) -> None:
    breaks = seed % 2 == 1
    draw, network, nodes = make_nodes(seed, 4, TIMEOUT_SECONDS, breaks)
    heap, victim = network.heap, nodes[draw.randrange(4)]
    network.faulty = False

    def die() -> None:
        victim.dead = True
        network.dead.add(victim.uid)

    heap.at(draw.random() * FAULTY_SECONDS, die)
    with clock.use(heap.clock):
        others = [node for node in nodes if node is not victim]
        limit = FAULTY_SECONDS + SETTLE_SECONDS + ROUNDS * TIMEOUT_SECONDS
        assert heap.run(lambda: all(node.rounds_completed == ROUNDS for node in others), limit)
        for node in others:
            # A half-open connection may also cost payloads of its other end, until it is replaced
            assert breaks or node.missing <= {victim.uid}
            assert node.counters.edge(victim.uid).wait_seconds <= (ROUNDS + 1) * TIMEOUT_SECONDS
