"""What a node does with the messages of its links: session, payloads, means, barriers, generations. No sockets, no
locks, no waits: whoever drives the links lets one thread in at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from decentnode import clock
from decentnode.communication.counters import Counters, purpose_of
from decentnode.communication.receive.chunking import to_bytes
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import RunState
from decentnode.communication.zeromq.link_state import BULK, Hold, QueuedMessage
from decentnode.communication.zeromq.message_maker import MessageMaker
from decentnode.communication.zeromq.reconfigure import Reconfiguration
from decentnode.communication.zeromq.reliable_links import ReliableLinks
from decentnode.communication.zeromq.tree_collectives import TreeCollectives
from decentnode.communication.zeromq.tree_mean import OutgoingPart
from decentnode.errors import AssemblyError, NodeFailed, PeerFault, PeerLost
from decentnode.wire.messages import (
    MEMBERSHIP,
    Arrive,
    Bye,
    Chunk,
    Depart,
    Message,
    Overdue,
    Part,
    Report,
    Skipped,
    Slot,
    Waits,
)
from decentnode.wire.session import (
    Joined,
    NotAssembled,
    PeerDeparted,
    PeerFailed,
    Rejected,
    Session,
    SessionEvent,
    StopAsked,
)

MEMBERSHIP_KINDS = frozenset({*MEMBERSHIP, Bye})


@dataclass(frozen=True)
class ProtocolParts:
    """What a node's protocol works with, for as long as the run lasts."""

    session: Session
    links: ReliableLinks
    inbox: Inbox
    state: RunState
    counters: Counters
    maker: MessageMaker
    hold: Hold
    """How long bodies are kept for sending."""
    consumed: Callable[[int, int], None]
    """(uid, bytes): bulk of `uid` that is used up."""
    has_room: Callable[[int], None]
    """(uid): a peer for which too many payloads waited takes some again."""
    joined: Callable[[], None]
    """Every node has joined."""
    reconfiguration: Reconfiguration | None = None
    """None in a run with but one generation of members."""


class NodeProtocol:
    """One node's; the owner of its links (`LinkOwner`). What it finds out goes into `RunState`."""

    def __init__(self, parts: ProtocolParts) -> None:
        self.joined = False
        """Whether the run has begun."""
        self.collectives: TreeCollectives
        """Of the generation in force; set with it."""
        self.take_slot: Callable[[Slot], None]
        """Takes a doorbell that came over the links; set with the generation."""
        self._parts = parts
        self._session, self._sender, self._inbox = parts.session, parts.links.sender, parts.inbox
        self._state, self._counters, self._maker = parts.state, parts.counters, parts.maker
        self._reconfiguration = parts.reconfiguration
        self.has_room = parts.has_room

    # -- sending ----------------------------------------------------------------------------------------------

    def control(self, uid: int, kind: type[Message], *values: object) -> None:
        """Send a control message to a peer."""
        self._sender.control_header(uid, self._maker.header(kind, *values), clock.now())

    def _unnumbered(self, uid: int, kind: type[Message]) -> None:
        self._sender.control_header(uid, self._maker.header(kind), clock.now(), numbered=False)

    def ask_overdue(self, uids: Collection[int]) -> None:
        """Ask these neighbors, whose payloads are overdue, whether they wait for others themselves."""
        for uid in uids:
            self._unnumbered(uid, Overdue)

    def emit(self, pieces: list[OutgoingPart]) -> None:
        """Send pieces of means, and tell whoever waits about finished ones."""
        for piece in pieces:
            raw = to_bytes(piece.tensor)
            header = self._maker.header(Part, piece.key, piece.down, piece.chunk, piece.contributors)
            sums = self._maker.sum_kind(BULK, [piece.to])
            message = QueuedMessage.bulk(header, raw, sums, hold=self._parts.hold, purpose=purpose_of(piece.key))
            self._sender.bulk(piece.to, message, clock.now())
        for uid, size in self.collectives.means.consumed:
            self._parts.consumed(uid, size)
        self.collectives.means.consumed.clear()
        if self.collectives.means.done:
            self._state.wake()

    def _flush(self) -> None:
        """Send what the session has to say."""
        now = clock.now()
        for uid, message in self._session.outbox:
            self._sender.control(uid, message, now)
        self._session.outbox.clear()

    def give_up(self) -> None:
        """The start has taken too long."""
        if self._session.state == "joining":
            self._on_event(self._session.give_up())
            self._flush()

    def ask_stop(self) -> None:
        """Tell every node to finish its round and stop."""
        self._session.ask_stop()
        self._flush()

    def depart(self, rounds: int, neighbors: Collection[int]) -> None:
        """Tell `neighbors` that this node sends payloads of rounds below `rounds` alone."""
        for uid in neighbors:
            self.control(uid, Depart, rounds)

    def fail(self, uid: int, reason: str) -> None:
        """Tell every node that `uid` failed."""
        self._session.fail(uid, reason)
        self._flush()

    # -- what the links bring (LinkOwner) ---------------------------------------------------------------------

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        """As `LinkPort.deliver`."""
        if isinstance(message, Chunk):
            assert body is not None
            edge = self._counters.edge(message.source)
            edge.frames_received += 1
            edge.payload_bytes_received += body.nbytes
            self._inbox.put(message, body, now)
        elif isinstance(message, Part):
            assert body is not None
            self.emit(self.collectives.means.receive(message, body))
        elif type(message) in MEMBERSHIP_KINDS:
            if self._reconfiguration is not None:
                self._reconfiguration.receive(message, now)
            elif not isinstance(message, Bye):
                raise PeerFault("unexpected_message", f"{type(message).__name__} in a run without generations")
        else:
            try:
                for event in self._session.receive(message):
                    if isinstance(event, Slot):
                        self.take_slot(event)
                    elif isinstance(event, Skipped):
                        first, last = (event.round, event.phase), (event.last_round, event.last_phase)
                        self._inbox.skip(event.source, first, last)
                    elif isinstance(event, Overdue):
                        if self._state.waiting is not None:
                            self._unnumbered(event.source, Waits)
                    elif isinstance(event, Waits):
                        self._inbox.waits_itself(event.source)
                    else:
                        self._on_event(event)
            finally:
                self._flush()

    def tick(self, now: float) -> None:
        """A few times per second."""
        for event in self._session.tick(now):
            self._on_event(event)
        self._flush()
        if self._reconfiguration is not None:
            self._reconfiguration.tick(now)

    def crashed(self, error: BaseException) -> None:
        """The thread at the sockets ends because of an error."""
        self.fail_with(NodeFailed(f"node {self._session.uid}: the I/O thread failed: {error!r}"))

    def _on_event(self, event: SessionEvent) -> None:
        own, state, reconfiguration = self._session.uid, self._state, self._reconfiguration
        if isinstance(event, Arrive):
            self.collectives.arrive(event.key, event.down, event.source)
        elif isinstance(event, Report):
            self.collectives.reported(event)
        elif isinstance(event, PeerFailed):
            reason = f"{self._session.describe(event.uid)} failed: {event.reason}"
            if reconfiguration is not None and reconfiguration.active:
                reconfiguration.suspect([event.uid], reason, clock.now(), dead=True)
                return
            if event.uid != own:
                self._parts.links.forget(event.uid)
            self.fail_with(PeerLost(reason, [event.uid]))
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
                state.stopping = True
            elif isinstance(event, PeerDeparted):
                state.departed[event.uid] = event.rounds
            state.wake()

    def _not_assembled(self, event: NotAssembled) -> AssemblyError:
        who = ", ".join(map(self._session.describe, event.missing[:20]))
        more = f" and {len(event.missing) - 20} more" if len(event.missing) > 20 else ""
        text = (
            f"{len(event.missing)} of {self._session.num_nodes} nodes did not join in time: {who}{more}"
            if event.missing
            else (f"node {self._session.uid} did not hear the start")
        )
        text = f"{text}; {event.reason}" if event.reason else text
        return AssemblyError(text + self._counters.refused_handshakes(), event.missing)

    def fail_with(self, error: Exception) -> None:
        """Any thread: every wait of this node raises this from now on, unless something came first."""
        self._state.fail(error)
