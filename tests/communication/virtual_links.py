"""Nodes that consist of their links, on a virtual network. A node is ticked only when its `next_deadline` says so: work
for which it names no deadline is never done, and the test fails."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.run_state import Wait
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


class VirtualNode:
    """One node's links, and what it received. It is the network's socket and the links' port."""

    def __init__(self, uid: int, n: int, network: VirtualNetwork, window: int, secure: bool) -> None:
        self.uid, self.network, self.heap = uid, network, network.heap
        self.session = self._session(n)
        self.counters, self.credits = Counters(), ReceiveCredits(window)
        self.links = ReliableLinks(self.session, self, self.counters, self.credits, BulkAccess(secure, secure))
        self.links.sender.control_kind = framing.XXH3
        self.control_received: dict[int, list[int]] = {}
        """By source: the numbers of its control messages, in the order of arrival."""
        self.bulk_received: dict[int, dict[int, bytes]] = {}
        """By source: the bodies of its bulk messages, by number."""
        self.goodbyes_from: set[int] = set()
        self.held: Counter[int] = Counter()
        """Bytes received from each source that are not consumed yet, as its credit window counts them."""
        self._alarm = DeadlineTimer(self.heap, lambda: self.next_deadline, self._tick)
        network.nodes[uid] = Socket(self._receive, self._writable, proves=secure)

    def _session(self, n: int) -> Session:
        """Returns a session whose run has begun."""
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
        """Makes a connection, for which the other node requires a credential that no connection has used."""
        given = next(node for node in self.others if node.uid == uid).links.access.given
        assert given[self.uid].refusal(self.links.sender.log_in(uid)) is None

    def carried(self, uid: int, plane: int) -> int | None:
        return None

    def renew(self, uid: int, plane: int) -> None:
        self.network.renew(self.uid, uid, plane)

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        assert now == clock.now()
        source = message.source
        if isinstance(message, Bye):
            self.goodbyes_from.add(source)
        elif isinstance(message, Depart):
            self.control_received.setdefault(source, []).append(message.rounds)
        else:
            assert isinstance(message, Chunk) and body is not None
            bodies = self.bulk_received.setdefault(source, {})
            assert message.chunk not in bodies, f"bulk message {message.chunk} of node {source} was delivered twice"
            bodies[message.chunk] = bytes(body)
            cost = body.nbytes + MESSAGE_COST
            self.held[source] += cost
            assert self.held[source] <= self.credits.window, "more bytes are held than the credit window allows"
            self.heap.after(self.network.random.random() * 0.2, lambda: self.consumed(source, cost))

    def consumed(self, uid: int, size: int) -> None:
        self.held[uid] -= size
        allowed = self.credits.consumed(uid, size)
        if allowed is not None:
            self.links.sender.grant(uid, allowed, self.heap.now)
        self._arm()

    def has_room(self, uid: int) -> None:
        """Does nothing: payloads that are withheld have tests of their own."""

    # -- calls of the network and the event queue -------------------------------------------------------------

    others: list[VirtualNode]
    """All nodes but this one; set before the first event."""
    _wait: Wait | None = None
    """What the node waits for, in subclasses that are more than their links."""

    def _advance(self) -> None:
        """Runs the node until it has to wait."""
        raise NotImplementedError

    def _step_at(self, wait: Wait, deadline: float) -> None:
        """Steps the wait again at its deadline, if the node then still waits for it."""

        def step() -> None:
            if self._wait is wait and wait.deadline == deadline:
                self._advance()

        assert deadline > self.heap.now
        self.heap.at(deadline, step)

    def _receive(self, plane: int, frames: list[memoryview], uid: int | None) -> None:
        self.links.receive(plane, frames, uid, self.heap.now)
        self._arm()

    def _writable(self, uid: int, plane: int) -> None:
        self.links.sender.writable(uid, plane, self.heap.now)
        self._arm()

    def _arm(self) -> None:
        """Schedules the next tick at `next_deadline`."""
        self._alarm.set()
        self._check()

    def _tick(self) -> None:
        self._do_due_work()
        assert self.next_deadline > self.heap.now, "a tick left something undone that was due"
        self._arm()

    @property
    def next_deadline(self) -> float:
        return self.links.next_deadline

    def _do_due_work(self) -> None:
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
        finished = self.links.finished(self.heap.now)
        self._arm()
        return finished

    # -- faults -----------------------------------------------------------------------------------------------

    def cut(self, uid: int, plane: int) -> None:
        """Breaks the connection to a peer."""
        self.network.cut(self.uid, uid, plane)
        if plane == BULK and self.links.access.needs_credential:  # libzmq does not make such a connection again
            self.links.disconnected(uid, plane)
            self._arm()

    def halve(self, uid: int, plane: int) -> None:
        """Makes the connection to a peer half-open: it still accepts messages, but delivers none."""
        self.network.halve(self.uid, uid, plane)

    def _check(self) -> None:
        """Checks the invariants of the links; called after every call of them."""
        check_links(self.links, self.heap.now)


def count_faults(run: Callable[[int], Counter[str]], seeds: Iterable[int]) -> Counter[str]:
    """Returns the sum of run(seed), which is how often each kind of fault happened. An error gets a note with its
    seed."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += run(seed)
        except BaseException as error:
            error.add_note(f"{run.__name__}({seed})")
            raise
    return happened


def draw_link(draw: random.Random) -> Link:
    """Returns random properties of connections: latency, queue length, and shares of lost, repeated, overtaken and
    damaged messages."""
    share = draw.choice((0.0, 0.05, 0.2))
    return Link(
        latency_seconds=draw.choice((0.001, 0.05)), jitter_seconds=draw.choice((0.0, 0.05)),
        queue_messages=draw.choice((3, 50)), loss=share * draw.random(), duplication=share * draw.random(),
        reordering=share * draw.random(), damage=share * draw.random(),
    )


def schedule_breaks(nodes: Sequence[VirtualNode], draw: random.Random, seconds: float) -> None:
    """Schedules up to eleven random breaks and half-open connections within the next `seconds`."""
    for _ in range(draw.randrange(0, 12)):
        source, other = draw.sample(range(len(nodes)), 2)
        fault = draw.choice((nodes[source].cut, nodes[source].cut, nodes[source].halve))
        plane = draw.choice((CONTROL, BULK))
        nodes[0].heap.after(draw.random() * seconds, lambda o=other, p=plane, f=fault: f(o, p))
