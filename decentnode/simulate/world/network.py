"""A simulated network in one thread: connections with latency, bandwidth, bounded queues and faults. It can carry
anything that sends through `LinkPort`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL, Body
from decentnode.faults import AnyFault, Link, MessageFate, MessageFates, damaged
from decentnode.simulate.world.event_queue import EventQueue

_NO_FAULT = MessageFate()
Receive = Callable[[int, list[memoryview], int | None], None]
"""receive(plane, frames, source): source is the sender's uid if the connection authenticates it, else None."""


@dataclass
class Connection:
    """One direction of a connection between two nodes, on one plane."""

    last_arrival: float = 0.0
    """When the last message sent so far arrives."""
    in_flight: int = 0
    blocked: bool = False
    dead: bool = False
    """Whether it accepts messages but loses them (a half-open connection). Only a new connection delivers again."""


@dataclass
class Socket:
    """The network's state of a node."""

    receive: Receive
    writable: Callable[[int, int], None]
    """Is called as writable(uid, plane) when a connection that refused a message accepts messages again."""
    proves: bool = False
    """Whether connections authenticate the node at their other end."""
    connections: dict[tuple[int, int], Connection] = field(default_factory=dict)
    """By the uid at the other end and plane."""
    suspended_until: float = 0.0
    """The process is suspended until this time; messages that arrive before wait."""


class VirtualNetwork:
    """Connections between the nodes of one process."""

    def __init__(self, heap: EventQueue, link: Link, seed: int) -> None:
        """link: the properties of all connections."""
        self.heap, self.link, self.random = heap, link, random.Random(seed)
        self.rules: list[tuple[int, AnyFault]] = []
        """Faults of single messages that are in effect, with their index in the plan."""
        self._fates = MessageFates(seed)
        self.faulty = True
        """Whether messages are lost, duplicated, reordered and damaged by the shares of `link`."""
        self.nodes: dict[int, Socket] = {}
        self.dead: set[int] = set()
        """Nodes that no longer send or receive."""
        self.cut_pairs: Counter[tuple[int, int]] = Counter()
        """For (source, uid) between which nothing passes: the number of faults in effect that cut them off."""
        self.happened: Counter[str] = Counter()
        """Number of messages that were sent, refused, lost, repeated, damaged, overtaken and touched by `rules`, and of
        connections that were cut."""
        self._line_free_at: dict[tuple[int, int, int], float] = {}
        """(source, uid, plane) -> when the line will have transmitted the plane's messages so far; only with a
        bandwidth."""

    def send(self, source: int, uid: int, plane: int, frames: Sequence[Body]) -> bool:
        """Sends a message, as `LinkPort.send` does. A body that is sent without a copy is read when the message
        arrives."""
        connection = self.nodes[source].connections.setdefault((uid, plane), Connection())
        fate = self._fates.of(self.rules, source, uid, plane) if self.rules else _NO_FAULT
        link, draw, happened = self.link, self.random.random, self.happened
        if connection.blocked or connection.in_flight >= link.queue_messages:
            connection.blocked = True
            happened["refused"] += 1
            return False
        happened["sent"] += 1
        connection.in_flight += 1
        leaves = self.heap.now
        if link.bytes_per_second is not None:
            leaves = self._transmit(source, uid, plane, sum(map(len, frames)) / link.bytes_per_second)
        leaves += fate.later
        arrives = leaves + link.latency_seconds + draw() * link.jitter_seconds
        arrives = connection.last_arrival = max(connection.last_arrival, arrives)  # a connection keeps the order
        arrives += fate.overtaken
        if self.faulty and draw() < link.reordering:
            happened["overtaken"] += 1
            arrives += 20 * link.latency_seconds * draw()
        copies = 1
        is_lost = connection.dead or not self.dead.isdisjoint((source, uid)) or bool(self.cut_pairs[source, uid])
        if is_lost or fate.lost or (self.faulty and draw() < link.loss):
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
            self.heap.at(connection.last_arrival, lambda: self._delivered(source, uid, plane, connection))
        return True

    def _transmit(self, source: int, uid: int, plane: int, seconds: float) -> float:
        """Returns when the line will have transmitted a message that takes `seconds`. The connections of both planes
        share the line, each in its own order: bytes in the line's buffer go before those of either plane, while the
        rest of a plane's bytes waits in its connection, where the other plane's bytes pass them."""
        line_free_at, now, other = self._line_free_at, self.heap.now, (source, uid, CONTROL + BULK - plane)
        rate, other_backlog = self.link.bytes_per_second, line_free_at.get(other, 0.0) - self.heap.now
        assert rate is not None
        earliest = now + min(max(other_backlog, 0.0), self.link.buffer_bytes / rate)
        done = line_free_at[source, uid, plane] = max(line_free_at.get((source, uid, plane), 0.0), earliest) + seconds
        if other_backlog > 0:
            line_free_at[other] += min(seconds, other_backlog)
        return done

    def _damaged(self, frames: Sequence[Body]) -> list[bytes]:
        which = self.random.randrange(len(frames))
        damaged = bytearray(_bytes(frames[which]))
        if damaged:
            damaged[self.random.randrange(len(damaged))] ^= 1 << self.random.randrange(8)
        return [bytes(damaged) if i == which else bytes(_bytes(frame)) for i, frame in enumerate(frames)]

    def _arrive(self, source: int, uid: int, plane: int, connection: Connection, frames: Sequence[Body]) -> None:
        receiver = self.nodes[uid]
        if self.heap.now < receiver.suspended_until:
            self.heap.at(receiver.suspended_until, lambda: self._arrive(source, uid, plane, connection, frames))
        elif not connection.dead and uid not in self.dead and not self.cut_pairs[source, uid]:
            # a copy, because a receiver may keep the memory
            received = [memoryview(bytearray(_bytes(frame))) for frame in frames]
            receiver.receive(plane, received, source if receiver.proves else None)

    def _delivered(self, source: int, uid: int, plane: int, connection: Connection) -> None:
        if self.heap.now < self.nodes[uid].suspended_until:  # the receiver is suspended and does not read
            self.heap.at(self.nodes[uid].suspended_until, lambda: self._delivered(source, uid, plane, connection))
            return
        connection.in_flight -= 1
        sender = self.nodes[source]
        if connection.blocked and sender.connections.get((uid, plane)) is connection and not connection.dead:
            connection.blocked = False
            sender.writable(uid, plane)

    def renew(self, source: int, uid: int, plane: int) -> None:
        """Replaces a connection, as `LinkPort.renew` does. Messages in flight may still arrive."""
        self.nodes[source].connections.pop((uid, plane), None)

    def takes(self, source: int, uid: int, plane: int) -> bool:
        """Returns whether a message that is sent now would arrive if no fault were in effect: its connection is not
        half-open."""
        found = self.nodes[source].connections.get((uid, plane))
        return found is None or not found.dead

    # -- faults -----------------------------------------------------------------------------------------------

    def cut(self, source: int, uid: int, plane: int) -> None:
        """Breaks a connection and loses its messages in flight; the next message goes over a new connection."""
        found = self.nodes[source].connections.pop((uid, plane), None)
        if found is not None:
            self.happened["cut"] += 1
            self.happened["lost"] += found.in_flight
            found.dead = True
            if found.blocked:
                self.nodes[source].writable(uid, plane)

    def halve(self, source: int, uid: int, plane: int) -> None:
        """Makes a connection half-open: it accepts messages but delivers none, until its owner makes a new one."""
        found = self.nodes[source].connections.get((uid, plane))
        if found is not None:
            self.happened["cut"] += 1
            found.dead = True

    def partition(self, one: Sequence[int], other: Sequence[int], seconds: float) -> None:
        """Blocks all messages between two sets of nodes for `seconds`."""
        pairs = [pair for a in one for b in other for pair in ((a, b), (b, a))]
        self.cut_pairs.update(pairs)
        self.heap.after(seconds, lambda: self.cut_pairs.subtract(pairs))

    def end(self, uid: int) -> None:
        """Ends a process: messages in flight to it and from it are lost, and so are all that are sent to it from now
        on."""
        self.dead.add(uid)
        for other, socket in self.nodes.items():
            for (to, _), connection in socket.connections.items():
                if uid in (other, to):
                    connection.dead = True

    def attach(self, uid: int, receive: Receive, writable: Callable[[int, int], None]) -> Socket:
        """Begins a process, in place of the one of this uid that ended. Other nodes get new connections to it."""
        self.dead.discard(uid)
        for socket in self.nodes.values():
            for which in [which for which in socket.connections if which[0] == uid]:
                del socket.connections[which]
        made = self.nodes[uid] = Socket(receive, writable)
        return made


def _bytes(frame: Body) -> bytes | memoryview:
    return frame if isinstance(frame, bytes) else frame.buffer
