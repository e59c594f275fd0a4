"""Handles the messages that a node's links deliver: session, payloads, means, barriers, generations.

No sockets, no locks, no clock, no waits: the driver of the links lets one thread call it at a time. now: seconds of any
monotonic clock.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decentnode.communication.counters import Counters, purpose_of
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.chunking import to_bytes
from decentnode.communication.run_state import RunFacts
from decentnode.communication.zeromq.protocol.collective_state import CollectiveState
from decentnode.communication.zeromq.protocol.link_state import BULK, Hold, QueuedMessage
from decentnode.communication.zeromq.protocol.message_maker import MessageMaker
from decentnode.communication.zeromq.protocol.reconfiguration import Reconfiguration
from decentnode.communication.zeromq.protocol.reliable_links import ReliableLinks
from decentnode.communication.zeromq.protocol.tree_mean import OutgoingPart
from decentnode.errors import AssemblyError, NodeFailed, PeerFault, PeerLost
from decentnode.wire.generation import Caller, Generation
from decentnode.wire.messages import (
    MEMBERSHIP,
    NO_RUN,
    Arrive,
    Asked,
    Bye,
    Chunk,
    Declined,
    Depart,
    Described,
    Granted,
    Message,
    Overdue,
    Part,
    Report,
    Skipped,
    Slot,
    Waits,
)
from decentnode.wire.orders import Action, OrderDue, Ordered
from decentnode.wire.session import Session
from decentnode.wire.session_events import (
    Joined,
    NotAssembled,
    PeerDeparted,
    PeerFailed,
    Rejected,
    SessionEvent,
    StopAsked,
)

MEMBERSHIP_KINDS = frozenset({*MEMBERSHIP, Bye})


class PayloadInbox(Protocol):
    """Receives payloads: `InboxState`, or `Inbox` if threads share it. Its methods are those of `InboxState`."""

    def put(self, message: Chunk, buffer: memoryview, now: float) -> None:
        """See `InboxState.put`."""

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey) -> None:
        """See `InboxState.skip`."""

    def note_waiting_report(self, source: int, now: float) -> None:
        """See `InboxState.note_waiting_report`."""

    def reset(self, round: int) -> None:
        """See `InboxState.reset`."""


@dataclass(frozen=True)
class ProtocolParts:
    """The objects with which a `NodeProtocol` works for the whole run."""

    session: Session
    links: ReliableLinks
    inbox: PayloadInbox
    facts: RunFacts
    counters: Counters
    maker: MessageMaker
    hold: Hold
    """Returns a long body in the form in which it is kept for sending (`link_state.Hold`)."""
    consumed: Callable[[int, int], None]
    """consumed(uid, bytes) is called when so many bytes of bulk messages of `uid` have been consumed."""
    has_room: Callable[[int], None]
    """has_room(uid) is called when the queue of a peer, which was full, has room again."""
    joined: Callable[[], None]
    """Called when every node has joined."""
    untried_addresses: Callable[[], str] = str
    """Returns what a message about nodes that do not answer says of their addresses (`PeerSockets`)."""
    reconfiguration: Reconfiguration | None = None
    """None if the run has only one generation of members."""
    lock: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)
    """Held around calls of the collectives: the lock of `facts`, if threads share them."""


class NodeProtocol:
    """Handles one node's messages; the owner of its links (`LinkOwner`). It records the state of the run in
    `RunFacts`."""

    def __init__(self, parts: ProtocolParts) -> None:
        self.joined = False
        """Whether the run has begun."""
        self.collectives: CollectiveState
        """The collectives of the generation in force; set with the generation."""
        self.take_slot: Callable[[Slot], None]
        """Handles a doorbell that arrived over the links; set with the generation."""
        self._parts = parts
        self._session, self._sender, self._inbox = parts.session, parts.links.sender, parts.inbox
        self._facts, self._counters, self._maker = parts.facts, parts.counters, parts.maker
        self._reconfiguration, self._lock = parts.reconfiguration, parts.lock
        self.has_room, self.consumed = parts.has_room, parts.consumed

    # -- generations ------------------------------------------------------------------------------------------

    def install(
        self, generation: Generation, restart: Callable[[Collection[int]], None], begin: Callable[[], None], now: float
    ) -> None:
        """Resets the state of the old generation and starts `generation`.

        restart(fresh): restarts the links, between the two. begin: creates the owner's parts of the generation and sets
        `collectives`.
        """
        assert self._reconfiguration is not None
        session, facts = self._session, self._facts
        if generation.stopping:
            session.stop_asked = facts.stopping = True
        session.adopt(self._reconfiguration.membership.run, generation.name, generation.members)
        restart(generation.fresh)
        self._inbox.reset(generation.first_round)
        facts.departed.clear()
        with self._lock:
            again = facts.orders.begin_generation(generation.first_round)
        begin()
        if again is not None:
            self.order(again, now)

    # -- sending ----------------------------------------------------------------------------------------------

    def control(self, uid: int, kind: type[Message], values: tuple[object, ...], now: float) -> None:
        """Sends a control message to a peer. values: its fields after the common ones."""
        self._sender.control_header(uid, self._maker.header(kind, *values), now)

    def _unnumbered(self, uid: int, kind: type[Message], now: float) -> None:
        self._sender.control_header(uid, self._maker.header(kind), now, numbered=False)

    def ask_overdue(self, uids: Collection[int], now: float) -> None:
        """Asks these neighbors, whose payloads are overdue, whether they wait for others themselves."""
        for uid in uids:
            self._unnumbered(uid, Overdue, now)

    def emit(self, pieces: Sequence[OutgoingPart], now: float) -> None:
        """Sends pieces of means."""
        for piece in pieces:
            raw = to_bytes(piece.tensor)
            header = self._maker.header(Part, piece.key, piece.down, piece.chunk, piece.contributors)
            sums = self._maker.checksum_kind(BULK, [piece.to])
            message = QueuedMessage.bulk(header, raw, sums, hold=self._parts.hold, purpose=purpose_of(piece.key))
            self._sender.bulk(piece.to, message, now)

    def bulk_moved_at(self, uid: int) -> float:
        """Implements `CollectivePort.bulk_moved_at`."""
        return self._sender.bulk_moved_at(uid)

    def _flush(self, now: float) -> None:
        """Sends the messages in the session's outbox."""
        for uid, message in self._session.outbox:
            self._sender.control(uid, message, now)
        self._session.outbox.clear()

    def give_up(self, now: float) -> None:
        """Ends the start of the run, which has taken too long."""
        if self._session.state == "joining":
            self._on_event(self._session.give_up(), now)
            self._flush(now)

    def ask_stop(self, now: float) -> None:
        """Tells every node to finish its round and stop."""
        self._session.ask_stop()
        self._flush(now)
        self._stops(now)

    def order(self, action: Action, now: float) -> None:
        """Gives an order of the operator to all nodes (wire/orders.py)."""
        if self._session.state == "running":
            for event in self._session.orders.ask(action):
                self._on_event(event, now)
            self._flush(now)

    def _on_order(self, event: Ordered | OrderDue, now: float) -> None:
        with self._lock:
            orders = self._facts.orders
            if isinstance(event, OrderDue):
                orders.due(event.action, event.round)
                following = []
            else:
                following = self._session.orders.answer(event.serial, orders.hear(event.action))
        self._facts.wake()
        for each in following:
            self._on_event(each, now)

    def _stops(self, now: float) -> None:
        """Records that the run is to stop."""
        self._facts.stopping = True
        if self._reconfiguration is not None:
            self._reconfiguration.stop(now)
        self._facts.wake()

    def depart(self, rounds: int, neighbors: Collection[int], now: float) -> None:
        """Tells `neighbors` that this node sends only payloads of rounds below `rounds`."""
        for uid in neighbors:
            self.control(uid, Depart, (rounds,), now)

    def fail(self, uid: int, reason: str, now: float) -> None:
        """Tells every node that `uid` failed."""
        self._session.fail(uid, reason)
        self._flush(now)

    # -- calls of the links (LinkOwner) -----------------------------------------------------------------------

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        """Implements `LinkPort.deliver`."""
        if isinstance(message, Chunk):
            assert body is not None
            edge = self._counters.edge(message.source)
            edge.frames_received += 1
            edge.received(body.nbytes, message.scalars)
            self._inbox.put(message, body, now)
            if self._reconfiguration is not None:
                self._reconfiguration.membership.watch.note_heard(message.source)
        elif isinstance(message, Part):
            assert body is not None
            with self._lock:
                self.collectives.part(message, body, now)
        elif type(message) in MEMBERSHIP_KINDS:
            self._on_membership(message, now)
        else:
            try:
                for event in self._session.receive(message, now):
                    self._on_neighbor(event, now)
            finally:
                if self._session.outbox:
                    self._flush(now)

    def _on_membership(self, message: Message, now: float) -> None:
        if isinstance(message, Bye):
            with self._lock:
                self.collectives.note_left(message.source)
        elif self._reconfiguration is not None and not self.joined:
            for event in self._session.assume_begun(message.run):
                self._on_event(event, now)
            self._flush(now)
        if self._reconfiguration is not None:
            self._reconfiguration.receive(message, now)
        elif not isinstance(message, Bye):
            raise PeerFault("unexpected_message", f"{type(message).__name__} in a run without generations")

    def _on_neighbor(self, event: SessionEvent, now: float) -> None:
        """Handles an event that the session returned for a message: a neighbor's message about its payloads, or an
        event of the run."""
        if isinstance(event, Slot):
            self.take_slot(event)
        elif isinstance(event, Skipped):
            self._inbox.skip(event.source, (event.round, event.phase), (event.last_round, event.last_phase))
        elif isinstance(event, Overdue):
            if self._facts.waiting is not None or self._is_catching_up:
                self._unnumbered(event.source, Waits, now)
        elif isinstance(event, Waits):
            self._inbox.note_waiting_report(event.source, now)
        else:
            self._on_event(event, now)

    def knocked(self, asked: Asked, caller: Caller, now: float) -> Granted | Described | Declined:
        """Answers a node outside the mapping, as `Reconfiguration.knocked` does."""
        if self._reconfiguration is None:
            reason = "the run admits no nodes beyond its mapping (node.missing, node.newcomers)"
            return Declined(NO_RUN, 0, self._session.uid, reason, 1, self._session.uid, "")
        return self._reconfiguration.knocked(asked, caller, now)

    @property
    def _is_catching_up(self) -> bool:
        return self._reconfiguration is not None and self._reconfiguration.is_catching_up

    @property
    def next_deadline(self) -> float:
        """The latest time at which `tick` has to be called; infinite if nothing is due."""
        if self._session.outbox:  # noting a broken handshake in the session puts messages there without sending them
            return -math.inf
        due = math.inf if self.joined else self._session.next_deadline
        return due if self._reconfiguration is None else min(due, self._reconfiguration.next_deadline)

    def tick(self, now: float) -> None:
        """Does what is due. To be called at `next_deadline` at the latest."""
        for event in self._session.tick(now):
            self._on_event(event, now)
        self._flush(now)
        if self._reconfiguration is not None:
            self._reconfiguration.tick(now)

    def crashed(self, error: BaseException) -> None:
        """Fails this node, because the I/O thread ended with an error."""
        self.fail_with(NodeFailed(f"node {self._session.uid}: the I/O thread failed: {error!r}"))

    def _on_event(self, event: SessionEvent, now: float) -> None:
        own, facts, reconfiguration = self._session.uid, self._facts, self._reconfiguration
        if isinstance(event, Arrive):
            with self._lock:
                self.collectives.arrive(event.key, event.down, event.source, now)
        elif isinstance(event, Report):
            with self._lock:
                self.collectives.note_report(event)
        elif isinstance(event, PeerFailed):
            reason = f"{self._session.describe(event.uid)} failed: {event.reason}"
            if reconfiguration is not None and reconfiguration.active:
                reconfiguration.suspect([event.uid], reason, now, dead=True)
                return
            if event.uid != own:
                self._parts.links.forget(event.uid)
            self.fail_with(PeerLost(reason, [event.uid]))
        elif isinstance(event, Ordered | OrderDue):
            self._on_order(event, now)
        elif isinstance(event, NotAssembled):
            self.fail_with(self._not_assembled(event))
        elif isinstance(event, Rejected):
            self.fail_with(AssemblyError(f"node {own} was refused: {event.reason}", [own]))
        else:
            if isinstance(event, Joined):
                self._parts.joined()
                self.joined = True
                if reconfiguration is not None:
                    reconfiguration.begin(self._session.run)
            elif isinstance(event, StopAsked):
                self._stops(now)
            elif isinstance(event, PeerDeparted):
                facts.departed[event.uid] = event.rounds
            facts.wake()

    def _not_assembled(self, event: NotAssembled) -> AssemblyError:
        who = ", ".join(map(self._session.describe, event.missing[:20]))
        more = f" and {len(event.missing) - 20} more" if len(event.missing) > 20 else ""
        text = (
            f"{len(event.missing)} of {self._session.num_nodes} nodes did not join in time: {who}{more}"
            if event.missing
            else (f"node {self._session.uid} did not receive the start signal")
        )
        text = f"{text}; {event.reason}" if event.reason else text
        text += self._counters.refused_handshakes() + self._parts.untried_addresses()
        return AssemblyError(text, event.missing)

    def fail_with(self, error: Exception) -> None:
        """Makes every wait of this node raise `error` from now on, unless it has failed already. May be called from any
        thread."""
        self._facts.fail(error)
