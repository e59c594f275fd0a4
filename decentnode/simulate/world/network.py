"""A network in one thread: connections with latency, bandwidth and bounded queues, and what goes wrong with them.
Whatever speaks through `LinkPort` can be driven by it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL, Body
from decentnode.faults import AnyFault, Fate, Fates, Link, damaged
from decentnode.simulate.world.heap import EventHeap

_UNTOUCHED = Fate()
Receive = Callable[[int, list[memoryview], int | None], None]
"""receive(plane, frames, uid of the source where the connection proves it)"""


@dataclass
class Connection:
    """One direction between two nodes on one plane."""

    last: float = 0.0
    """When the last message arrives."""
    under_way: int = 0
    blocked: bool = False
    dead: bool = False
    """It takes messages, and loses them (a half-open connection); only a new one is any good."""


@dataclass
class Socket:
    """What the network knows of a node."""

    receive: Receive
    writable: Callable[[int, int], None]
    """writable(uid, plane): a connection that refused a message takes messages again."""
    proves: bool = False
    """Whether connections prove who is at their other end."""
    connections: dict[tuple[int, int], Connection] = field(default_factory=dict)
    """By the uid at the other end, and plane."""
    thaws_at: float = 0.0
    """The process is suspended until then: what arrives waits."""


class VirtualNetwork:
    """Connections between nodes of one process."""

    def __init__(self, heap: EventHeap, link: Link, seed: int) -> None:
        """link: of all connections."""
        self.heap, self.link, self.random = heap, link, random.Random(seed)
        self.rules: list[tuple[int, AnyFault]] = []
        """Faults of single messages that are in effect, with their place in the plan."""
        self._fates = Fates(seed)
        self.faulty = True
        """Whether messages are lost, repeated, overtaken and damaged."""
        self.nodes: dict[int, Socket] = {}
        self.dead: set[int] = set()
        """Nodes that neither send nor receive any more."""
        self.severed: Counter[tuple[int, int]] = Counter()
        """(source, uid) between which nothing passes, and how many faults say so."""
        self.happened: Counter[str] = Counter()
        """How many messages were sent, refused, lost, repeated, damaged and overtaken, and connections cut."""
        self._free: dict[tuple[int, int, int], float] = {}
        """When the line from a node to another has carried what a plane gave it, where it has a bandwidth."""

    def send(self, source: int, uid: int, plane: int, frames: Sequence[Body]) -> bool:
        """As `LinkPort.send`. The bytes of a body that is kept without a copy are read when they arrive."""
        connection = self.nodes[source].connections.setdefault((uid, plane), Connection())
        fate = self._fates.of(self.rules, source, uid, plane) if self.rules else _UNTOUCHED
        link, draw, happened = self.link, self.random.random, self.happened
        if connection.blocked or connection.under_way >= link.queue_messages:
            connection.blocked = True
            happened["refused"] += 1
            return False
        happened["sent"] += 1
        connection.under_way += 1
        leaves = self.heap.now
        if link.bytes_per_second is not None:
            leaves = self._carried(source, uid, plane, sum(map(len, frames)) / link.bytes_per_second)
        leaves += fate.later
        arrives = connection.last = max(connection.last, leaves + link.latency_seconds + draw() * link.jitter_seconds)
        arrives += fate.overtaken
        if self.faulty and draw() < link.reordering:
            happened["overtaken"] += 1
            arrives += 20 * link.latency_seconds * draw()
        copies = 1
        gone = connection.dead or not self.dead.isdisjoint((source, uid)) or bool(self.severed[source, uid])
        if gone or fate.lost or (self.faulty and draw() < link.loss):
            happened["lost"] += 1
            copies = 0
        elif fate.twice or (self.faulty and draw() < link.duplication):
            happened["repeated"] += 1
            copies = 2
        if self.faulty and copies and draw() < link.damage:
            happened["damaged"] += 1
            frames = self._damaged(frames)
        if copies and fate.flipped is not None:
            happened["damaged"] += 1
            frames = damaged([bytes(_bytes(frame)) for frame in frames], fate.flipped)
        happened["touched"] += fate.fault >= 0
        for _ in range(copies):
            self.heap.at(arrives, lambda: self._arrive(source, uid, plane, connection, frames))
            arrives += link.latency_seconds * draw()
        if not connection.dead:
            self.heap.at(connection.last, lambda: self._left(source, uid, plane, connection))
        return True

    def _carried(self, source: int, uid: int, plane: int, seconds: float) -> float:
        """Returns when the line has carried a message that takes it `seconds`. Both connections share it, each in its
        own order: what is in the line's buffer is before either, while the rest of a plane's bytes waits in the
        connection, where those of the other pass it."""
        free, now, other = self._free, self.heap.now, (source, uid, CONTROL + BULK - plane)
        rate, ahead = self.link.bytes_per_second, free.get(other, 0.0) - self.heap.now
        assert rate is not None
        before = now + min(max(ahead, 0.0), self.link.buffer_bytes / rate)
        done = free[source, uid, plane] = max(free.get((source, uid, plane), 0.0), before) + seconds
        if ahead > 0:
            free[other] += min(seconds, ahead)
        return done

    def _damaged(self, frames: Sequence[Body]) -> list[bytes]:
        which = self.random.randrange(len(frames))
        damaged = bytearray(_bytes(frames[which]))
        if damaged:
            damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
        return [bytes(damaged) if i == which else bytes(_bytes(frame)) for i, frame in enumerate(frames)]

    def _arrive(self, source: int, uid: int, plane: int, connection: Connection, frames: Sequence[Body]) -> None:
        there = self.nodes[uid]
        if self.heap.now < there.thaws_at:
            self.heap.at(there.thaws_at, lambda: self._arrive(source, uid, plane, connection, frames))
        elif not connection.dead and uid not in self.dead and not self.severed[source, uid]:
            # memory of its own, as a receiver may keep it
            received = [memoryview(bytearray(_bytes(frame))) for frame in frames]
            there.receive(plane, received, source if there.proves else None)

    def _left(self, source: int, uid: int, plane: int, connection: Connection) -> None:
        if self.heap.now < self.nodes[uid].thaws_at:  # nobody reads at the other end
            self.heap.at(self.nodes[uid].thaws_at, lambda: self._left(source, uid, plane, connection))
            return
        connection.under_way -= 1
        here = self.nodes[source]
        if connection.blocked and here.connections.get((uid, plane)) is connection and not connection.dead:
            connection.blocked = False
            here.writable(uid, plane)

    def renew(self, source: int, uid: int, plane: int) -> None:
        """As `LinkPort.renew`. What is under way may still arrive."""
        self.nodes[source].connections.pop((uid, plane), None)

    def takes(self, source: int, uid: int, plane: int) -> bool:
        """Whether what is sent now arrives, once nothing is faulty."""
        found = self.nodes[source].connections.get((uid, plane))
        return found is None or not found.dead

    # -- faults -----------------------------------------------------------------------------------------------

    def cut(self, source: int, uid: int, plane: int) -> None:
        """The connection breaks, with what is under way; the next message goes over another."""
        found = self.nodes[source].connections.pop((uid, plane), None)
        if found is not None:
            self.happened["cut"] += 1
            self.happened["lost"] += found.under_way
            found.dead = True
            if found.blocked:
                self.nodes[source].writable(uid, plane)

    def halve(self, source: int, uid: int, plane: int) -> None:
        """Messages go into the connection, and none comes out any more, until its owner makes another."""
        found = self.nodes[source].connections.get((uid, plane))
        if found is not None:
            self.happened["cut"] += 1
            found.dead = True

    def sever(self, one: Sequence[int], other: Sequence[int], seconds: float) -> None:
        """Nothing passes between two sets of nodes for so long."""
        pairs = [pair for a in one for b in other for pair in ((a, b), (b, a))]
        self.severed.update(pairs)
        self.heap.after(seconds, lambda: self.severed.subtract(pairs))

    def end(self, uid: int) -> None:
        """A process ends: what is under way to it and from it is lost, and so is what is said to it from now on."""
        self.dead.add(uid)
        for other, socket in self.nodes.items():
            for (to, _), connection in socket.connections.items():
                if uid in (other, to):
                    connection.dead = True

    def attach(self, uid: int, receive: Receive, writable: Callable[[int, int], None]) -> Socket:
        """A process begins, in place of the one of this uid that ended. The others' connections to it are made anew."""
        self.dead.discard(uid)
        for socket in self.nodes.values():
            for which in [which for which in socket.connections if which[0] == uid]:
                del socket.connections[which]
        made = self.nodes[uid] = Socket(receive, writable)
        return made


def _bytes(frame: Body) -> bytes | memoryview:
    return frame if isinstance(frame, bytes) else frame.buffer
