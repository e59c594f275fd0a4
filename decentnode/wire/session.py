"""The control protocol of one node: the start of a run, departures and failures, without sockets or clocks.

Control messages travel along a tree over the uids (wire/control_tree.py) with uid 0 at the root: `Hello` and `Present`
go up, `Start` goes down, `Stop` and `Fail` go to every node. `Session` takes messages and returns events and messages
to send. wire/session_states.py has its states and the messages that each admits.

All of it is in one file because a message may change any part of the one state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from decentnode.errors import PeerFault
from decentnode.wire.bounds import MAX_LONG_TEXT, fitting
from decentnode.wire.codec import from_bitmap, to_bitmap
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.generation import FIRST, Name
from decentnode.wire.messages import (
    NO_RUN,
    PROTOCOL_VERSION,
    Absent,
    Arrive,
    Depart,
    Due,
    Fail,
    Hello,
    Message,
    Order,
    Position,
    Present,
    Refused,
    Reject,
    Report,
    Start,
    Stop,
    Welcome,
)
from decentnode.wire.orders import OrderTree
from decentnode.wire.sections import differing_sections, encode_sections
from decentnode.wire.session_events import (
    Joined,
    NotAssembled,
    PeerDeparted,
    PeerFailed,
    Rejected,
    SessionEvent,
    StopAsked,
)
from decentnode.wire.session_states import ADMISSIBLE, FROM_CHILD, FROM_PARENT, IN_A_RUN, Cause, State, next_state

HELLO_EVERY_SECONDS = 0.5
HELLO_WINDOW_SECONDS = 0.25
MAX_REFUSALS = 64
"""Most nodes for which a session keeps the reason why they were refused."""
MAX_HELLOS = 8
"""Most `Hello` messages of one source that are answered within HELLO_WINDOW_SECONDS."""


class Session:
    """One node's side of the control protocol. Not thread-safe; never blocks. `outbox` holds (receiver, message) pairs
    that the owner is to send."""

    def __init__(
        self,
        uid: int,
        num_nodes: int,
        digest: str,
        run: bytes | None = None,
        *,
        software: str = "",
        describe: Callable[[int], str] = lambda uid: f"node {uid}",
        founders: int | None = None,
        sections: Mapping[str, str] | None = None,
    ) -> None:
        """Creates the session in state "joining". Raises ValueError if `uid` is 0 and `run` is None.

        num_nodes: number of possible uids. founders: number of nodes that begin the run; None: all. digest: digest of
        configuration and graph; nodes with another digest are refused. sections: name -> digest (hex) of the parts of
        the configuration, the same names on all nodes, so that a refusal can name the parts that differ. run: id of the
        run if it is already known; uid 0 must know it. describe: returns the name of a node for reasons.
        """
        if uid == 0 and run is None:
            raise ValueError("uid 0 must know the run id, got None")
        self.uid = uid
        self.num_nodes = num_nodes
        self.digest = digest
        self.run = run or NO_RUN
        self.generation, self.origin = FIRST
        self.founders = num_nodes if founders is None else founders
        self.members: tuple[int, ...] = tuple(range(self.founders))
        """The uids of the generation's members, ascending."""
        self.tree = ControlTree.among(uid, self.members if uid < self.founders else (uid,))
        self.state: State = "joining"
        self.outbox: list[tuple[int, Message]] = []
        self.present = {uid}
        self.departed: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.refusals: dict[int, str] = {}
        self.stop_asked = False
        self.orders = OrderTree(self.send, lambda: self.tree)
        self._sections = dict(sections or {})
        self._software = f"{encode_sections(self._sections)}{software}"[:128]
        self.describe = describe
        self._welcomed = uid == 0
        self._next_hello = 0.0
        self._hellos: dict[int, tuple[float, int]] = {}
        """source -> (when its window began, number of its `Hello` messages since then)."""
        self._waiting_children: set[int] = set()
        self._present_sent: set[int] = set()

    def start_outside(self) -> None:
        """Marks this process as outside a run that has already begun: it accepts no messages of it until `adopt`."""
        self._change("comes from outside")

    def _change(self, cause: Cause) -> None:
        self.state = next_state(self.state, cause)

    def adopt(self, run: bytes, name: Name, members: tuple[int, ...]) -> None:
        """Continues as a member of another generation. Messages of the previous one are dropped, except for a stop."""
        self.run, self.members = run, members
        self.generation, self.origin = name
        self._change("new generation")
        self.tree, self._welcomed = ControlTree.among(self.uid, members), True
        self.outbox.clear()
        self.departed.clear()
        self.failed.clear()
        self.present = set(members)
        self.orders.begin_generation()
        if self.stop_asked:
            self._flood(Stop)

    @property
    def name(self) -> Name:
        """The name of the generation in force."""
        return self.generation, self.origin

    # -- outgoing ---------------------------------------------------------------------------------------------

    def send(self, to: int, kind: type[Message], *values: object) -> None:
        self.outbox.append((to, kind(self.run, self.generation, self.uid, *values, origin=self.origin)))

    @property
    def next_deadline(self) -> float:
        """The latest time at which `tick` has to be called: infinite once the parent has answered, minus infinity on a
        root that knows all nodes to be present, so that `tick` begins the run."""
        if self.state != "joining":
            return math.inf
        if not self._welcomed:
            return self._next_hello
        return -math.inf if self._all_present else math.inf

    def tick(self, now: float) -> list[SessionEvent]:
        """Repeats the `Hello` until the parent answers, and returns the events of a start that is complete.

        The owner calls it at `next_deadline` at the latest. now: seconds of any monotonic clock.
        """
        if self.state == "joining" and not self._welcomed and now >= self._next_hello:
            self._next_hello = now + HELLO_EVERY_SECONDS
            self.send(self._parent(), Hello, PROTOCOL_VERSION, self.digest, self.num_nodes, self._software)
        return self._complete()

    @property
    def absent(self) -> tuple[int, ...]:
        """The uids that this node does not know to be present; on the root, exactly those that have not joined."""
        return tuple(uid for uid in range(self.founders) if uid not in self.present)

    def give_up(self) -> NotAssembled:
        """Ends the wait for the start, whose deadline has passed, and returns the missing nodes. The root sends them to
        all other nodes."""
        self._change("deadline passed")
        known = self.tree.parent is None
        missing = self.absent if known else self._missing_below()
        refused = "; ".join(self.refusals[uid] for uid in sorted(self.refusals))
        if known:
            for child in self.tree.children:
                self.send(child, Absent, to_bitmap(missing, self.num_nodes), fitting(refused, MAX_LONG_TEXT))
            return NotAssembled(missing, refused)
        above = f"the start did not come from {self.describe(self._parent())}"
        if not self._welcomed:
            above = f"no answer from {self.describe(self._parent())}"
        return NotAssembled(missing, "; ".join(filter(None, [above, refused])))

    def ask_stop(self) -> None:
        if not self.stop_asked:
            self.stop_asked = True
            self._flood(Stop)

    def fail(self, uid: int, reason: str) -> None:
        if uid not in self.failed:
            self.failed[uid] = reason
            self._flood(Fail, uid, fitting(reason))

    def _flood(self, kind: type[Message], *values: object, but: int | None = None) -> None:
        for link in self.tree.links:
            if link != but:
                self.send(link, kind, *values)

    # -- incoming ---------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[SessionEvent]:
        """Returns the events that one decoded message causes; a message that the session does not handle is returned
        unchanged. Raises PeerFault for a message that its sender may not send now; the state does not change then."""
        self.admit(message)
        if isinstance(message, Hello):
            return self._on_hello(message, now)
        if isinstance(message, Order | Position | Due):
            return [*self.orders.receive(message)]
        handler = getattr(self, f"_on_{type(message).__name__.lower()}", None)
        return [message] if handler is None else handler(message)

    def admit(self, message: Message) -> None:
        """Raises PeerFault for a message that its sender may not send now."""
        kind = type(message)
        if message.source >= self.num_nodes or message.source == self.uid:
            raise PeerFault("unknown_uid", str(message.source))
        if kind not in ADMISSIBLE[self.state]:
            raise PeerFault("unexpected_message", f"{kind.__name__} while {self.state}")
        if kind in IN_A_RUN:
            self.belongs(message)
            if isinstance(message, Arrive):
                self._check_arrival(message)
            return
        if kind in FROM_PARENT and message.source != self.tree.parent:
            raise PeerFault("wrong_sender", f"{kind.__name__} from {message.source}")
        if kind in FROM_CHILD and message.source not in self.tree.children:
            raise PeerFault("wrong_sender", f"{kind.__name__} from {message.source}")
        if isinstance(message, Order) and message.source not in ((self.tree.parent,) if message.down
                                                                 else self.tree.children):  # fmt: skip
            raise PeerFault("wrong_sender", f"Order from {message.source}")
        if kind in (Hello, Reject):
            return
        if kind is Welcome and self.run == NO_RUN:
            return
        self.belongs(message)

    def _check_arrival(self, arrive: Arrive) -> None:
        """Raises PeerFault unless this comes up from a tree child or down from the tree parent."""
        if arrive.source not in ((self.tree.parent,) if arrive.down else self.tree.children):
            raise PeerFault("wrong_sender", f"barrier {arrive.key!r} from {arrive.source}")

    def belongs(self, message: Message) -> None:
        """Raises PeerFault for a message of another run or generation, or from a uid that no other node can have."""
        if message.source >= self.num_nodes or message.source == self.uid:
            raise PeerFault("unknown_uid", str(message.source))
        if message.run != self.run or self.run == NO_RUN:
            raise PeerFault("wrong_run", f"{type(message).__name__} of run {message.run.hex()}")
        if message.generation != self.generation or message.origin != self.origin:
            stale = (message.generation, message.origin) < (self.generation, self.origin)
            reason = "stale_generation" if stale else "wrong_generation"
            raise PeerFault(reason, f"{type(message).__name__} of generation {message.generation}")

    def _on_hello(self, hello: Hello, now: float) -> list[SessionEvent]:
        since, heard = self._hellos.get(hello.source, (now, 0))
        if now - since >= HELLO_WINDOW_SECONDS:
            since, heard = now, 0
        self._hellos[hello.source] = since, heard + 1
        if heard >= MAX_HELLOS:
            raise PeerFault("hello_flood", f"from {hello.source}")
        reason = self._refusal(hello)
        if reason is not None:
            self.send(hello.source, Reject, hello.digest, fitting(reason))
            self.note_refusal(hello.source, reason)
        elif self._welcomed:
            self.send(hello.source, Welcome)
        else:
            self._waiting_children.add(hello.source)
        return []

    def _refusal(self, hello: Hello) -> str | None:
        who = self.describe(hello.source)
        if hello.version != PROTOCOL_VERSION:
            return f"{who} speaks protocol {hello.version}, the run speaks {PROTOCOL_VERSION}"
        if hello.num_nodes != self.num_nodes:
            return f"{who} has {hello.num_nodes} nodes in its graph, the run has {self.num_nodes}"
        if hello.digest != self.digest:
            where = "compare config.resolved.yaml and graph.edges in the run folders of both machines"
            parts = differing_sections(self._sections, hello.software)
            which = f"; these differ: {', '.join(parts)}" if parts else ""
            digests = f"digest {hello.digest}, the run has {self.digest}{which}"
            return f"{who} has another config or graph ({digests}): {where}"
        if hello.run not in (NO_RUN, self.run) and self.run != NO_RUN:
            return f"{who} belongs to run {hello.run.hex()}, this is run {self.run.hex()}"
        return None

    def note_refusal(self, uid: int, reason: str) -> bool:
        """Keeps the reason why `uid` cannot take part and sends it to the root. Returns False if the reason is already
        known, or if MAX_REFUSALS reasons are kept."""
        if self.refusals.get(uid) == reason or len(self.refusals) >= MAX_REFUSALS:
            return False
        self.refusals[uid] = reason
        if self.tree.parent is not None and self._welcomed:
            self.send(self._parent(), Refused, uid, fitting(reason))
        return True

    def _on_welcome(self, welcome: Welcome) -> list[SessionEvent]:
        if self._welcomed:
            return []
        self.run = welcome.run
        self._welcomed = True
        for child in sorted(self._waiting_children):
            self.send(child, Welcome)
        for uid, reason in self.refusals.items():
            self.send(self._parent(), Refused, uid, fitting(reason))
        self._send_presence()
        return []

    def _on_reject(self, reject: Reject) -> list[SessionEvent]:
        if self.state != "joining" or self._welcomed or reject.digest != self.digest:
            return []
        self._change("Reject")
        return [Rejected(reject.reason)]

    def _on_present(self, present: Present) -> list[SessionEvent]:
        self.present |= {uid for uid in from_bitmap(present.uids, self.num_nodes) if uid < self.founders}
        for uid in self.present & self.refusals.keys():
            del self.refusals[uid]
        self._send_presence()
        return self._complete()

    def _send_presence(self) -> None:
        if self.tree.parent is not None and self._welcomed and self.present != self._present_sent:
            self._present_sent = set(self.present)
            self.send(self._parent(), Present, to_bitmap(self.present, self.num_nodes))

    def _complete(self) -> list[SessionEvent]:
        return self._begin("all present") if self.state == "joining" and self._all_present else []

    @property
    def _all_present(self) -> bool:
        """Whether this node is the root and knows that every node is present."""
        return self.tree.parent is None and len(self.present) == self.founders

    def _begin(self, cause: Cause) -> list[SessionEvent]:
        self._change(cause)
        self.present = set(range(self.founders))
        for child in self.tree.children:
            self.send(child, Start)
        return [Joined()]

    def assume_begun(self, run: bytes) -> list[SessionEvent]:
        """Takes a message about generations of this run as the start, which must have been lost.

        The node that should have sent the start may be dead, and a link discards its unacknowledged messages when the
        generation ends.
        """
        return self._begin("Start") if self.state == "joining" and self._welcomed and run == self.run else []

    def _on_start(self, start: Start) -> list[SessionEvent]:  # noqa: ARG002
        return self._begin("Start")

    def _on_refused(self, refused: Refused) -> list[SessionEvent]:
        if refused.uid >= self.num_nodes:
            raise PeerFault("unknown_uid", str(refused.uid))
        self.note_refusal(refused.uid, refused.reason)
        return []

    def _on_absent(self, absent: Absent) -> list[SessionEvent]:
        missing = tuple(sorted(from_bitmap(absent.uids, self.num_nodes)))
        self._change("Absent")
        for child in self.tree.children:
            self.send(child, Absent, absent.uids, absent.reason)
        return [NotAssembled(missing, absent.reason)]

    def _on_stop(self, stop: Stop) -> list[SessionEvent]:
        if self.stop_asked:
            return []
        self.stop_asked = True
        self._flood(Stop, but=stop.source)
        return [StopAsked()]

    def _on_depart(self, depart: Depart) -> list[SessionEvent]:
        self.departed[depart.source] = depart.rounds
        return [PeerDeparted(depart.source, depart.rounds)]

    def _on_fail(self, fail: Fail) -> list[SessionEvent]:
        if fail.uid >= self.num_nodes:
            raise PeerFault("unknown_uid", str(fail.uid))
        if fail.uid in self.failed:
            return []
        self.failed[fail.uid] = fail.reason
        self._flood(Fail, fail.uid, fail.reason, but=fail.source)
        return [PeerFailed(fail.uid, fail.reason)]

    def _on_report(self, report: Report) -> list[SessionEvent]:
        if report.uid >= self.num_nodes:
            raise PeerFault("unknown_uid", str(report.uid))
        if self.tree.parent is not None:
            self.send(self._parent(), Report, report.uid, report.figures)
        return [report]

    def _parent(self) -> int:
        assert self.tree.parent is not None
        return self.tree.parent

    def _missing_below(self) -> tuple[int, ...]:
        return tuple(uid for uid in self.subtree() if uid not in self.present)

    def subtree(self, top: int | None = None) -> Iterable[int]:
        """Returns `top` (this node's uid if None) and all uids below it in the tree, ascending."""
        level = [self.uid if top is None else top]
        found: list[int] = []
        while level:
            found += level
            level = [child for uid in level for child in ControlTree.among(uid, self.members).children]
        return sorted(found)
