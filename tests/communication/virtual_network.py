"""A network in one process and one thread: connections with latency and bounded queues, faults, and an event heap on
virtual time. Whatever speaks through `LinkPort` can be driven by it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from decentnode.clock import VirtualClock

Receive = Callable[[int, list[memoryview], int | None], None]
"""receive(plane, frames, uid of the source where the connection proves it)"""


class EventHeap:
    """What is to happen, in the order of its times; of two at one time, the one that was added first."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def now(self) -> float:
        return self.clock.now()

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, over: Callable[[], bool], until: float) -> bool:
        """Whether `over` came to hold by the time `until`; it is asked after every event."""
        while not over():
            if not self._events or self._events[0][0] > until:
                return False
            when, _, action = heapq.heappop(self._events)
            self.clock.advance_to(when)
            action()
        return True


@dataclass(frozen=True)
class Model:
    """How connections carry messages, and what goes wrong while `VirtualNetwork.faulty`. Shares are of messages."""

    latency: float = 0.01
    """Seconds on the way, at least."""
    jitter: float = 0.02
    """Most seconds more. A connection keeps the order all the same."""
    capacity: int = 50
    """Messages that a connection takes before they arrive."""
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    """Messages that others overtake."""
    damage: float = 0.0
    """Messages of which a bit arrives flipped."""


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
class Node:
    """What the network knows of a node."""

    receive: Receive
    writable: Callable[[int, int], None]
    """writable(uid, plane): a connection that refused a message takes messages again."""
    proves: bool = False
    """Whether connections prove who is at their other end."""
    connections: dict[tuple[int, int], Connection] = field(default_factory=dict)
    """By the uid at the other end, and plane."""


class VirtualNetwork:
    """Connections between nodes of one process."""

    def __init__(self, heap: EventHeap, model: Model, seed: int) -> None:
        self.heap, self.model, self.random = heap, model, random.Random(seed)
        self.faulty = True
        self.nodes: dict[int, Node] = {}
        self.dead: set[int] = set()
        """Nodes that neither send nor receive any more."""
        self.sent = self.refused = self.lost = self.repeated = self.damaged = self.overtaken = self.cuts = 0

    def send(self, source: int, uid: int, plane: int, frames: list[bytes]) -> bool:
        """As `LinkPort.send`."""
        connection = self.nodes[source].connections.setdefault((uid, plane), Connection())
        if connection.blocked or connection.under_way >= self.model.capacity:
            connection.blocked = True
            self.refused += 1
            return False
        self.sent += 1
        connection.under_way += 1
        model, draw = self.model, self.random.random
        arrives = connection.last = max(connection.last, self.heap.now + model.latency + draw() * model.jitter)
        if self.faulty and draw() < model.reordering:
            self.overtaken += 1
            arrives += 20 * model.latency * draw()
        copies = 1
        if connection.dead or not self.dead.isdisjoint((source, uid)) or (self.faulty and draw() < model.loss):
            self.lost += 1
            copies = 0
        elif self.faulty and draw() < model.duplication:
            self.repeated += 1
            copies = 2
        if self.faulty and copies and draw() < model.damage:
            self.damaged += 1
            frames = self._damaged(frames)
        for _ in range(copies):
            self.heap.at(arrives, lambda: self._arrive(source, uid, plane, connection, frames))
            arrives += model.latency * draw()
        if not connection.dead:
            self.heap.at(connection.last, lambda: self._left(source, uid, plane, connection))
        return True

    def _damaged(self, frames: list[bytes]) -> list[bytes]:
        which = self.random.randrange(len(frames))
        damaged = bytearray(frames[which])
        if damaged:
            damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
        return [bytes(damaged) if i == which else frame for i, frame in enumerate(frames)]

    def _arrive(self, source: int, uid: int, plane: int, connection: Connection, frames: list[bytes]) -> None:
        if not connection.dead and uid not in self.dead:
            there = self.nodes[uid]
            # memory of its own, as a receiver may keep it
            there.receive(plane, [memoryview(bytearray(frame)) for frame in frames], source if there.proves else None)

    def _left(self, source: int, uid: int, plane: int, connection: Connection) -> None:
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
            self.cuts += 1
            self.lost += found.under_way
            found.dead = True
            if found.blocked:
                self.nodes[source].writable(uid, plane)

    def halve(self, source: int, uid: int, plane: int) -> None:
        """Messages go into the connection, and none comes out any more, until its owner makes another."""
        found = self.nodes[source].connections.get((uid, plane))
        if found is not None:
            self.cuts += 1
            found.dead = True
