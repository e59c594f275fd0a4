"""Nodes that are but their links, on a virtual network. Each is ticked by `next_deadline` alone, so that whatever that
forgets to name would never be done."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.protocol.credentials import BulkAccess
from decentnode.communication.zeromq.protocol.link_state import (
    BULK,
    CONTROL,
    Body,
    QueuedMessage,
    ReceiveCredits,
)
from decentnode.communication.zeromq.protocol.reliable_links import ReliableLinks
from decentnode.faults import Link
from decentnode.simulate.world.event_queue import DeadlineTimer
from decentnode.simulate.world.history import check_links
from decentnode.simulate.world.network import Socket, VirtualNetwork
from decentnode.wire import codec, framing
from decentnode.wire.generation import FIRST
from decentnode.wire.messages import Bye, Chunk, Depart, Message
from decentnode.wire.session import Session

RUN = b"theirrun"


class End:
    """One node: its links, what it sends and what came; the network's node and the links' port."""

    def __init__(self, uid: int, n: int, network: VirtualNetwork, window: int, secure: bool) -> None:
        self.uid, self.network, self.heap = uid, network, network.heap
        self.session = self._session(n)
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
        self._alarm = DeadlineTimer(self.heap, lambda: self.next_deadline, self._tick)
        network.nodes[uid] = Socket(self._receive, self._writable, proves=secure)

    def _session(self, n: int) -> Session:
        """One whose run has begun."""
        session = Session(self.uid, n, "d", RUN)
        session.start_outside()
        session.adopt(RUN, FIRST, tuple(range(n)))
        return session

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

    def carried(self, uid: int, plane: int) -> int | None:
        return None

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
        self._alarm.set()
        self._check()

    def _tick(self) -> None:
        self.ticked += 1
        self._do_what_is_due()
        assert self.next_deadline > self.heap.now, "what was due has been done"
        self._arm()

    @property
    def next_deadline(self) -> float:
        return self.links.next_deadline

    def _do_what_is_due(self) -> None:
        self.links.tick(self.heap.now)

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

    # -- faults -----------------------------------------------------------------------------------------------

    def cut(self, uid: int, plane: int) -> None:
        """The connection to a peer breaks."""
        self.network.cut(self.uid, uid, plane)
        if plane == BULK and self.links.access.needs_credential:  # libzmq does not make such a connection again
            self.links.disconnected(uid, plane)
            self._arm()

    def halve(self, uid: int, plane: int) -> None:
        """Nothing comes out of the connection to a peer any more."""
        self.network.halve(self.uid, uid, plane)

    def _check(self) -> None:
        """After every call of the links: what must hold at all times."""
        check_links(self.links, self.heap.now)


def drawn_link(draw: random.Random) -> Link:
    """Connections that are fast or slow, wide or narrow, sound or not."""
    share = draw.choice((0.0, 0.05, 0.2))
    return Link(
        latency_seconds=draw.choice((0.001, 0.05)), jitter_seconds=draw.choice((0.0, 0.05)),
        queue_messages=draw.choice((3, 50)), loss=share * draw.random(), duplication=share * draw.random(),
        reordering=share * draw.random(), damage=share * draw.random(),
    )


def plan_breaks(ends: Sequence[End], draw: random.Random, seconds: float) -> None:
    """A few connections break, or go on without anything coming out of them, within the next `seconds`."""
    for _ in range(draw.randrange(0, 12)):
        source, other = draw.sample(range(len(ends)), 2)
        happens = draw.choice((ends[source].cut, ends[source].cut, ends[source].halve))
        plane = draw.choice((CONTROL, BULK))
        ends[0].heap.after(draw.random() * seconds, lambda o=other, p=plane, h=happens: h(o, p))
