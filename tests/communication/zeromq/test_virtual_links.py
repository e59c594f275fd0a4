"""Links over a virtual network that loses, repeats, damages, delays and cuts: one thread, one event heap, no sockets.

Each node is ticked by `next_deadline` alone, so that whatever that forgets to name would never be done.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.credentials import BulkAccess
from decentnode.communication.zeromq.link_state import (
    BULK,
    CONTROL,
    MAX_URGENT,
    Body,
    QueuedMessage,
    ReceiveCredits,
)
from decentnode.communication.zeromq.reliable_links import ACK_EVERY, ACK_SECONDS, ReliableLinks
from decentnode.wire import codec, framing
from decentnode.wire.generation import FIRST
from decentnode.wire.messages import Bye, Chunk, Depart, Message
from decentnode.wire.session import Session
from decentnode.wire.stream import PROBE_SECONDS
from tests.communication.virtual_network import EventHeap, Model, Node, VirtualNetwork
from tests.conftest import scale

RUN = b"theirrun"
SEEDS, PER_CASE = scale(200, 20_000), scale(50, 500)
FAULTY_SECONDS, SETTLE_SECONDS = 4.0, 120.0
FORGIVEN = {"checksum_mismatch", "protocol_version", "malformed_header"}
"""What a flipped bit may look like."""
ENCRYPTED = FORGIVEN | {"wrong_run", "wrong_generation", "wrong_identity", "unknown_uid", "unknown_kind", "wrong_plane"}
"""Where bodies are encrypted, a header has no sum, and is read before the body proves it."""


class End:
    """One node: its links, what it sends and what came; the network's node and the links' port."""

    def __init__(self, uid: int, n: int, network: VirtualNetwork, window: int, secure: bool) -> None:
        self.uid, self.network, self.heap = uid, network, network.heap
        self.session = Session(uid, n, "d", RUN)
        self.session.come_from_outside()
        self.session.adopt(RUN, FIRST, tuple(range(n)))
        self.counters, self.credits = Counters(), ReceiveCredits(window)
        self.links = ReliableLinks(self.session, self, self.counters, self.credits, BulkAccess(secure, secure))
        self.links.sender.control_kind = framing.XXH3
        self.came: dict[int, list[int]] = {}
        """By source: the numbers of control messages, as they came."""
        self.bodies: dict[int, dict[int, bytes]] = {}
        """By source and number: what bulk messages brought."""
        self.byes: set[int] = set()
        self.held: Counter[int] = Counter()
        """Bytes that came of a source and are not used up, as its window counts them."""
        self.ticked = 0
        self._armed = float("inf")
        network.nodes[uid] = Node(self._receive, self._writable, proves=secure)

    # -- the port ---------------------------------------------------------------------------------------------

    def send(self, uid: int, plane: int, first: bytes, body: Body | None) -> bool:
        assert body is None or isinstance(body, bytes)
        if (plane == BULK and self.links.access.needs_credential
                and (uid, plane) not in self.network.nodes[self.uid].connections):  # fmt: skip
            self._log_in(uid)
        return self.network.send(self.uid, uid, plane, [first] if body is None else [first, body])

    def _log_in(self, uid: int) -> None:
        """A connection is made: the other end asks for a credential that no connection had before."""
        given = next(end for end in self.others if end.uid == uid).links.access.given
        assert given[self.uid].refusal(self.links.sender.log_in(uid)) is None

    def renew(self, uid: int, plane: int) -> None:
        self.network.renew(self.uid, uid, plane)

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        assert now == clock.now()
        source = message.source
        if isinstance(message, Bye):
            self.byes.add(source)
        elif isinstance(message, Depart):
            self.came.setdefault(source, []).append(message.rounds)
        else:
            assert isinstance(message, Chunk) and body is not None
            bodies = self.bodies.setdefault(source, {})
            assert message.chunk not in bodies, f"{message.chunk} of {source} came twice"
            bodies[message.chunk] = bytes(body)
            cost = body.nbytes + MESSAGE_COST
            self.held[source] += cost
            assert self.held[source] <= self.credits.window, "more is held than the window says"
            self.heap.after(self.network.random.random() * 0.2, lambda: self.consumed(source, cost))

    def consumed(self, uid: int, size: int) -> None:
        self.held[uid] -= size
        allowed = self.credits.consumed(uid, size)
        if allowed is not None:
            self.links.sender.grant(uid, allowed, self.heap.now)
        self._arm()

    def has_room(self, uid: int) -> None:
        """Payloads that are withheld are the sender's tests."""

    # -- what drives the links --------------------------------------------------------------------------------

    others: list[End]

    def _receive(self, plane: int, frames: list[memoryview], uid: int | None) -> None:
        self.links.receive(plane, frames, uid, self.heap.now)
        self._arm()

    def _writable(self, uid: int, plane: int) -> None:
        self.links.sender.writable(uid, plane, self.heap.now)
        self._arm()

    def _arm(self) -> None:
        """Tick when there is something to do, and not before."""
        due = max(self.links.next_deadline, self.heap.now)
        if due < self._armed:
            self._armed = due
            self.heap.at(due, lambda: self._tick(due))
        self._check()

    def _tick(self, due: float) -> None:
        if due == self._armed:
            self.ticked += 1
            self._armed = float("inf")
            self.links.tick(self.heap.now)
            assert self.links.next_deadline > self.heap.now, "what was due has been done"
            self._arm()

    def send_control(self, uid: int, number: int) -> None:
        self.links.sender.control(uid, Depart(RUN, 0, self.uid, number), self.heap.now)
        self._arm()

    def send_bulk(self, uids: list[int], number: int, body: bytes) -> None:
        header = codec.encode(Chunk(RUN, 0, self.uid, 0, 0, 0, number, 1 << 20, {}))
        message = QueuedMessage.bulk(header, memoryview(body), framing.XXH3)
        for uid in uids:
            self.links.sender.bulk(uid, message, self.heap.now)
        self._arm()

    def finished(self) -> bool:
        over = self.links.finished(self.heap.now)
        self._arm()
        return over

    def _check(self) -> None:
        """After every call of the links: what must hold at all times."""
        due = self.links.next_deadline
        for edge in self.links.sender.edges.values():
            assert edge.sent <= edge.allowed or not edge.planes[BULK].out.kept, "more is sent than the window allows"
            for number, plane in enumerate(edge.planes):
                assert len(plane.urgent) <= MAX_URGENT and len(plane.again) <= plane.out.following
                assert plane.came.unreported < ACK_EVERY[number]
                if plane.came.unreported:
                    assert due <= self.heap.now + ACK_SECONDS
                if plane.out.kept:
                    assert due <= self.heap.now + PROBE_SECONDS[1]


class Story:
    """A few nodes that send each other control and bulk while things go wrong, and then no more."""

    def __init__(self, seed: int) -> None:
        draw = self.random = random.Random(seed)
        share = draw.choice((0.0, 0.05, 0.2))
        model = Model(draw.choice((0.001, 0.05)), draw.choice((0.0, 0.05)), draw.choice((3, 50)), share * draw.random(),
                      share * draw.random(), share * draw.random(), share * draw.random())  # fmt: skip
        self.heap = EventHeap()
        self.network = VirtualNetwork(self.heap, model, seed)
        n, window, secure = draw.choice((2, 2, 4)), draw.choice((4000, 64_000)), draw.random() < 0.2
        self.ends = [End(uid, n, self.network, window, secure) for uid in range(n)]
        self.control: dict[tuple[int, int], int] = {}
        """(source, destination) -> control messages sent."""
        self.bulk: dict[tuple[int, int], dict[int, bytes]] = {}
        for end in self.ends:
            end.others = [other for other in self.ends if other is not end]
        self._plan()

    def _plan(self) -> None:
        draw = self.random
        for end in self.ends:
            for number in range(draw.randrange(4, 25)):
                self.heap.at(draw.random() * FAULTY_SECONDS, lambda end=end, number=number: self._send(end, number))
        for _ in range(draw.randrange(0, 12)):
            source, other = draw.sample(range(len(self.ends)), 2)
            fault = draw.choice((self._cut, self._cut, self.network.halve))
            plane, when = draw.choice((CONTROL, BULK)), draw.random() * FAULTY_SECONDS
            self.heap.at(when, lambda s=source, o=other, p=plane, f=fault: f(s, o, p))

    def _cut(self, source: int, uid: int, plane: int) -> None:
        self.network.cut(source, uid, plane)
        end = self.ends[source]
        if plane == BULK and end.links.access.needs_credential:  # libzmq does not make such a connection again
            end.links.disconnected(uid, plane)
            end._arm()

    def _send(self, end: End, number: int) -> None:
        draw = self.random
        others = [other.uid for other in end.others if draw.random() < 0.7]
        for uid in others:
            count = self.control.get((end.uid, uid), 0)
            self.control[end.uid, uid] = count + 1
            end.send_control(uid, count)
        body = draw.randbytes(draw.choice((0, 100, 1500, 20_000 if end.credits.window > 20_500 else 2500)))
        for uid in others:
            self.bulk.setdefault((end.uid, uid), {})[number] = body
        end.send_bulk(others, number, body)

    def arrived(self) -> bool:
        return all(
            self.ends[b].came.get(a, []) == list(range(self.control.get((a, b), 0)))
            and self.ends[b].bodies.get(a, {}) == self.bulk.get((a, b), {})
            for a in range(len(self.ends)) for b in range(len(self.ends)) if a != b
        )

    def tell(self) -> None:
        with clock.use(self.heap.clock):
            self.heap.run(lambda: False, FAULTY_SECONDS)
            self.network.faulty = False
            limit = FAULTY_SECONDS + SETTLE_SECONDS
            assert self.heap.run(self.arrived, limit), "not everything came"
            assert self.heap.run(lambda: all(list(map(End.finished, self.ends))), limit)
            self.heap.run(lambda: False, self.heap.now + 10 * self.network.model.latency + 1)
            assert self.arrived(), "and nothing twice"
            forgiven = ENCRYPTED if self.ends[0].links.access.encrypts else FORGIVEN
            for end in self.ends:
                assert end.counters.faults.keys() <= (forgiven if self.network.damaged else set()), end.counters.faults
                assert not +end.held and not any(edge.planes[p].out.kept for edge in end.links.sender.edges.values()
                                                 for p in (CONTROL, BULK))  # fmt: skip
                end.links.goodbye(self.heap.now)
            whole = [(a, b) for a, b in self.control if self.network.takes(a, b, CONTROL)]
            assert self.heap.run(lambda: all(a in self.ends[b].byes for a, b in whole), self.heap.now + 5)


@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
def test_every_message_comes_once_and_whole(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + PER_CASE):
        story = Story(seed)
        try:
            story.tell()
        except BaseException as error:
            error.add_note(f"Story({seed}).tell()")
            raise
        for end in story.ends:
            happened["resent"] += sum(edge.resends for edge in end.counters.edges.values())
        network = story.network
        happened.update(lost=network.lost, cut=network.cuts, repeated=network.repeated, damaged=network.damaged,
                        overtaken=network.overtaken, refused=network.refused)  # fmt: skip
    assert all(happened[what] for what in ("resent", "lost", "cut", "repeated", "damaged", "overtaken", "refused"))
