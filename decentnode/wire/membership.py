"""How nodes agree on the next generation of members when some died, froze or came back. No sockets, no threads.

Whoever misses a member names it to the lowest uid among the others. That one prepares a generation: every member of it
promises to begin no further round, says how far it is, puts away what belonged to the old generation once all have
promised (commit), and goes on when everybody is ready. A stage is said again at every tick until it is answered, so
that nothing depends on a single message; whoever is silent for `suspect_seconds` is left out of the next attempt, the
lowest uid included. Numbers only grow, and a node follows only the highest that it promised. With `min_nodes` more than
half of the run, two generations can never be in force at once, unless so many processes are started again, which have
forgotten what they promised, that none of a generation remembers it (transport.md section 2.5).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from decentnode.errors import PeerFault
from decentnode.wire.codec import bitmap, from_bitmap
from decentnode.wire.messages import (
    NO_RUN,
    PROTOCOL_VERSION,
    Bye,
    Commit,
    Evicted,
    Go,
    Join,
    Message,
    Ping,
    Pong,
    Prepare,
    Promise,
    Ready,
    Suspect,
)

JOIN_EVERY_SECONDS = 0.5
PING_AFTER_SECONDS = 0.5
"""Whoever is waited for this long is asked whether it lives."""


@dataclass(frozen=True)
class Generation:
    """Who takes part from `first_round` on. `fresh` members have no model of their own yet."""

    number: int
    members: tuple[int, ...]
    first_round: int = 0
    fresh: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Limits:
    """Seconds, and how small a generation may be."""

    suspect_seconds: float
    """A process that says nothing for so long is left out."""
    ready_seconds: float
    """A process that lives, but does not get ready for so long, is left out."""
    min_nodes: int


@dataclass(frozen=True)
class Broken:
    """The generation in force ends: begin no further round."""

    reason: str


@dataclass(frozen=True)
class Install:
    """Everybody promised: put away the old generation, then say `installed`."""

    generation: Generation


@dataclass(frozen=True)
class Going:
    """The generation is in force."""

    generation: Generation


@dataclass(frozen=True)
class Outside:
    """This node belongs to no generation; it asks to be let in."""

    reason: str


Event = Broken | Install | Going | Outside

Stage = Literal["steady", "suspecting", "short", "preparing", "promised", "committing", "committed", "outside"]
"""suspecting: waiting for the one that leads; short: leading, but too few are left; promised, committed: following;
preparing, committing: leading."""


@dataclass
class _Proposal:
    """What the leader of the next generation knows of it."""

    number: int
    members: frozenset[int]
    heard: dict[int, float]
    promises: dict[int, tuple[int, bool]] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    committed_at: float = 0.0


class Membership:
    """One node's side. `now` is any monotonic clock; messages to send gather in `outbox`."""

    def __init__(
        self, uid: int, num_nodes: int, limits: Limits, *, digest: str = "", run: bytes = NO_RUN,
        describe: Callable[[int], str] = lambda uid: f"node {uid}",
    ) -> None:
        self.uid, self.num_nodes, self.limits = uid, num_nodes, limits
        self.run = run
        self.generation = Generation(0, tuple(range(num_nodes)))
        """The one in force, or the last that was."""
        self.stage: Stage = "steady"
        self.outbox: list[tuple[int, Message]] = []
        self.suspects: set[int] = set()
        self.left: set[int] = set()
        """Members that said goodbye."""
        self.position = 0
        """Rounds that are over here as soon as the one under way is."""
        self.fresh = False
        self.coordinator = uid
        self.promised = 0
        """The highest number that this node promised to follow, or proposed."""
        self.reason = ""
        """Why the generation in force ended, or why none can follow it."""
        self._digest, self._describe = digest, describe
        self._guest = False
        """Whether this node came from outside and is in no generation yet."""
        self._events: list[Event] = []
        self._seen = 0
        self._pending: Generation | None = None
        self._installed = False
        self._proposal: _Proposal | None = None
        self._heard = 0.0
        """When the coordinator last spoke, or was first asked."""
        self._joiners: dict[int, bytes] = {}
        self._admitted: dict[int, bytes] = {}
        self._pinged: dict[int, float] = {}
        self._incarnation = os.urandom(8)
        self._next_join = 0.0
        self._outside_before = 0
        """How often this node was outside: it comes back later every time, lest a bad link breaks every generation."""
        self._last_tick: float | None = None

    # -- what the owner says ----------------------------------------------------------------------------------

    @property
    def steady(self) -> bool:
        return self.stage == "steady"

    def suspect(self, uids: Collection[int], now: float, reason: str = "") -> list[Event]:
        """These do not answer, or failed."""
        self._suspect(set(uids), now, reason)
        return self._taken()

    def _suspect(self, uids: set[int], now: float, reason: str = "") -> None:
        proposal = self._proposal
        known = set(self.generation.members) - self.left if proposal is None else proposal.members
        new = uids & known - self.suspects - {self.uid}
        if not new or self.stage == "outside":
            return
        self.suspects |= new
        if self.stage == "steady":
            self._break(reason or f"{', '.join(map(self._describe, sorted(new)))} does not answer")
        following = self.stage in ("promised", "committed") and self.coordinator not in new
        if not following:
            self._turn(now)

    def leave(self, now: float, reason: str) -> list[Event]:
        """Come from outside: a restarted process, or one that the others went on without."""
        self._go_outside(now, reason)
        return self._taken()

    def installed(self, number: int, now: float) -> list[Event]:
        """What belonged to the old generation is put away."""
        if self._pending is None or self._pending.number != number:
            return self._taken()
        self._installed = True
        if self.stage == "committing":
            assert self._proposal is not None
            self._proposal.ready.add(self.uid)
            self._check_ready(now)
        elif self.stage == "committed":
            self._say(self.coordinator, Ready, number)
        return self._taken()

    def tick(self, now: float, waiting_for: Iterable[int] = (), waiting_seconds: float = 0.0) -> list[Event]:
        """A few times per second. waiting_for: whom the training waits for, and for how long already."""
        if self._last_tick is not None and now - self._last_tick > self.limits.suspect_seconds / 2:
            self._forgive(now)  # this process did not run: that is nobody else's silence
        self._last_tick = now
        if self.stage == "steady":
            self._watch(waiting_for, waiting_seconds, now)
        elif self.stage == "suspecting":
            self._ask(now)
        elif self.stage in ("preparing", "committing"):
            self._lead(now)
        elif self.stage == "outside":
            self._knock(now)
        elif self.stage == "short":
            for uid in range(self.num_nodes):  # whoever went on without this node says so
                if uid != self.uid:
                    self._say(uid, Ping)
        elif now - self._heard > self.limits.suspect_seconds:
            self.suspects.add(self.coordinator)
            self._turn(now)
        else:
            self._follow()
        return self._taken()

    # -- messages ---------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[Event]:
        """Raises PeerFault for what may not be said; nothing changes then."""
        source = message.source
        if source >= self.num_nodes or source == self.uid:
            raise PeerFault("unknown_uid", str(source))
        joining = isinstance(message, Join) or (self.stage == "outside" and self.run == NO_RUN)
        if message.run != self.run and not joining:
            raise PeerFault("wrong_run", f"{type(message).__name__} of run {message.run.hex()}")
        if not self._guest or isinstance(message, Prepare | Commit | Go | Evicted):
            getattr(self, f"_on_{type(message).__name__.lower()}")(message, now)
        return self._taken()

    def _on_ping(self, ping: Ping, now: float) -> None:  # noqa: ARG002
        if not self._is_stranger(ping):
            self._say(ping.source, Pong)

    def _on_pong(self, pong: Pong, now: float) -> None:
        self._pinged.pop(pong.source, None)
        if self.stage == "suspecting" and pong.source == self.coordinator:
            self._heard = now
        elif self.stage == "short" and pong.source in self.suspects:
            self.suspects.discard(pong.source)
            self._turn(now)

    def _on_bye(self, bye: Bye, now: float) -> None:
        if bye.source not in self.suspects:
            self.left.add(bye.source)
            if self.stage in ("suspecting", "promised", "committed") and self.coordinator == bye.source:
                self._turn(now)

    def _on_join(self, join: Join, now: float) -> None:
        if self._admitted.get(join.source) == join.incarnation:
            return
        if join.version != PROTOCOL_VERSION or join.digest != self._digest or join.num_nodes != self.num_nodes:
            raise PeerFault("wrong_config", f"{self._describe(join.source)} asks to join with {join.digest}")
        if self._joiners.get(join.source) == join.incarnation:
            return
        self._joiners[join.source] = join.incarnation
        self.left.discard(join.source)
        if join.source in self.generation.members:  # its old process is gone
            self._suspect({join.source}, now, f"{self._describe(join.source)} was started again")
        if self.stage == "short":
            self._turn(now)
        self._admit(now)

    def _on_suspect(self, suspect: Suspect, now: float) -> None:
        if self._is_stranger(suspect):
            return
        uids = from_bitmap(suspect.uids, self.num_nodes)
        self._say(suspect.source, Pong)
        if self.stage in ("promised", "committed"):
            return  # whoever leads already hears for itself who answers
        if self._proposal is not None and suspect.source not in self._proposal.members:
            return
        if suspect.generation == self.generation.number:
            who = ", ".join(map(self._describe, sorted(uids)))
            what = "failed" if suspect.source in uids else f"does not answer {self._describe(suspect.source)}"
            self._suspect(uids, now, f"{who} {what}")
            if self.stage == "steady":  # nobody of it is missed here, but it is over for whoever asks
                self._break(f"{self._describe(suspect.source)} asks for another generation")
                self._turn(now)

    def _on_prepare(self, prepare: Prepare, now: float) -> None:
        number, members = prepare.generation, from_bitmap(prepare.members, self.num_nodes)
        if self.uid not in members:
            return
        if prepare.source not in members:
            raise PeerFault("wrong_sender", f"generation {number} prepared by {prepare.source}")
        again = number == self.promised and prepare.source == self.coordinator
        if number < self.promised or (number == self.promised and not again):
            if not self._is_stranger(prepare):
                self._say(prepare.source, Promise, self.promised, self.position, int(self.fresh))
            return
        if self.stage == "steady":
            self._break(f"{self._describe(prepare.source)} prepares generation {number}")
        if not again:
            self.run = prepare.run
            self.promised, self.coordinator, self.stage = number, prepare.source, "promised"
            self.suspects -= members
            self._proposal, self._pending, self._installed = None, None, False
        self._heard = now
        self._follow()

    def _on_promise(self, promise: Promise, now: float) -> None:
        self._seen = max(self._seen, promise.generation)
        proposal = self._proposal
        if proposal is None or promise.source not in proposal.members:
            self._is_stranger(promise)
            return
        proposal.heard[promise.source] = now
        if self.stage == "preparing" and promise.generation == proposal.number:
            proposal.promises[promise.source] = (promise.position, bool(promise.fresh))
            self._check_promises(now)

    def _on_commit(self, commit: Commit, now: float) -> None:
        if not self._follows(commit):
            return
        self._heard = now
        if self.stage == "promised":
            members = tuple(sorted(from_bitmap(commit.members, self.num_nodes)))
            fresh = frozenset(from_bitmap(commit.fresh, self.num_nodes))
            self._pending = Generation(commit.generation, members, commit.first_round, fresh)
            self.stage = "committed"
            self._events.append(Install(self._pending))
        self._follow()

    def _on_ready(self, ready: Ready, now: float) -> None:
        proposal = self._proposal
        if proposal is not None and ready.generation == proposal.number and ready.source in proposal.members:
            proposal.heard[ready.source] = now
            if self.stage == "committing":
                proposal.ready.add(ready.source)
                self._check_ready(now)
        elif self.stage == "steady" and ready.generation == self.generation.number:
            self._say(ready.source, Go, ready.generation)
        else:
            self._is_stranger(ready)

    def _on_go(self, go: Go, now: float) -> None:
        if self._follows(go) and self.stage == "committed" and self._installed:
            self._enter(now)

    def _on_evicted(self, evicted: Evicted, now: float) -> None:
        following = self.stage in ("promised", "committed") and evicted.generation < self.promised
        if evicted.generation > self.generation.number and not following and self.stage != "outside":
            self._go_outside(now, f"the others went on without this node, in generation {evicted.generation}")

    def _follows(self, message: Message) -> bool:
        """Whether this comes from the one that this node promised to follow, about what it promised."""
        following = self.stage in ("promised", "committed")
        return following and message.generation == self.promised and message.source == self.coordinator

    def _is_stranger(self, message: Message) -> bool:
        """Whether somebody speaks who is not of the last generation in force; one that was left behind is told so."""
        inside = message.source in self.generation.members
        if not inside and message.generation <= self.generation.number:
            self._say(message.source, Evicted)
        return not inside

    # -- stages -----------------------------------------------------------------------------------------------

    def _break(self, reason: str) -> None:
        self.stage, self.reason = "suspecting", reason
        self._pinged.clear()
        self._events.append(Broken(reason))

    def _turn(self, now: float) -> None:
        """Whoever led, if anybody, is out: the lowest uid of those left leads."""
        if self._guest:
            self._go_outside(now, f"{self._describe(self.coordinator)} did not let this node in")
            return
        self.stage, self._proposal, self._pending, self._installed = "suspecting", None, None, False
        first = min(set(self.generation.members) - self.suspects - self.left | {self.uid})
        if first == self.uid:
            self._propose(now)
        else:
            self.coordinator, self._heard = first, now
            self._ask(now)

    def _ask(self, now: float) -> None:
        """Name those that are missed to the one that leads; if it is silent, to the next."""
        if now - self._heard > self.limits.suspect_seconds:
            self.suspects.add(self.coordinator)
            self._turn(now)
        else:
            self._say(self.coordinator, Suspect, None, bitmap(self.suspects, self.num_nodes))

    def _admit(self, now: float) -> None:
        """Let in whoever asked, where that is this node's to do and nothing else is under way."""
        inside = set(self.generation.members) - self.suspects - self.left
        if self.stage == "steady" and self._joiners.keys() - inside and self.uid == min(inside):
            names = ", ".join(map(self._describe, sorted(self._joiners)))
            self._break(f"{names} asked to join")
            self._propose(now)

    def _propose(self, now: float) -> None:
        members = frozenset(set(self.generation.members) - self.suspects - self.left | self._joiners.keys())
        if len(members) + len(self.left) < self.limits.min_nodes:
            gone = ", ".join(map(self._describe, sorted(self.suspects)))
            self.stage = "short"
            self.reason = (
                f"{gone} does not answer, and a generation needs {self.limits.min_nodes} of {self.num_nodes} nodes "
                f"(node.min_nodes)"
            )
            return
        number = max(self.generation.number, self.promised, self._seen) + 1
        self.promised, self.coordinator, self.stage = number, self.uid, "preparing"
        self._proposal = _Proposal(number, members, dict.fromkeys(members, now))
        self._proposal.promises[self.uid] = (self.position, self.fresh)
        self._check_promises(now)
        self._say_stage()

    def _lead(self, now: float) -> None:
        """At every tick of a proposal: leave out who is silent, else say the stage again."""
        proposal = self._proposal
        assert proposal is not None
        silent = {
            uid for uid, heard in proposal.heard.items()
            if uid != self.uid and now - heard > self.limits.suspect_seconds
        } - self.left
        if self.stage == "committing" and now - proposal.committed_at > self.limits.ready_seconds:
            silent |= proposal.members - proposal.ready - {self.uid}
        if silent or proposal.members & self.left or self._seen > proposal.number:
            self.suspects |= silent
            for uid in silent:
                self._joiners.pop(uid, None)
            self._turn(now)
        else:
            self._say_stage()

    def _say_stage(self) -> None:
        proposal = self._proposal
        if proposal is None:
            return
        members = bitmap(proposal.members, self.num_nodes)
        for uid in sorted(proposal.members - {self.uid}):
            if self.stage == "preparing":
                self._say(uid, Prepare, proposal.number, members)
            elif self._pending is not None:
                fresh = bitmap(self._pending.fresh, self.num_nodes)
                self._say(uid, Commit, proposal.number, members, fresh, self._pending.first_round)

    def _check_promises(self, now: float) -> None:
        proposal = self._proposal
        if proposal is None or self.stage != "preparing" or proposal.promises.keys() != proposal.members:
            return
        fresh = frozenset(uid for uid, (_, fresh) in proposal.promises.items() if fresh)
        ahead = [position for uid, (position, _) in proposal.promises.items() if uid not in fresh]
        if not ahead:
            self._go_outside(now, "no node that is left has a model")
            return
        self._pending = Generation(proposal.number, tuple(sorted(proposal.members)), max(ahead), fresh)
        self._installed, self.stage, proposal.committed_at = False, "committing", now
        self._say_stage()
        self._events.append(Install(self._pending))

    def _check_ready(self, now: float) -> None:
        proposal = self._proposal
        if proposal is None or self.stage != "committing" or proposal.ready != proposal.members:
            return
        for uid in sorted(proposal.members - {self.uid}):
            self._say(uid, Go, proposal.number)
        self._enter(now)

    def _follow(self) -> None:
        """Say again what the coordinator waits for."""
        if self.stage == "committed" and self._installed:
            self._say(self.coordinator, Ready, self.promised)
        elif self.stage in ("promised", "committed"):
            self._say(self.coordinator, Promise, self.promised, self.position, int(self.fresh))

    def _enter(self, now: float) -> None:
        assert self._pending is not None
        self.generation, self._pending, self._proposal = self._pending, None, None
        self.stage, self._installed, self.position = "steady", False, self.generation.first_round
        self._guest = False
        for uid in self._joiners.keys() & set(self.generation.members):
            self._admitted[uid] = self._joiners.pop(uid)
        self.left -= set(self.generation.members)
        self.suspects.clear()
        self._pinged.clear()
        self._events.append(Going(self.generation))
        self._admit(now)

    def _go_outside(self, now: float, reason: str) -> None:
        if self.stage == "steady":
            self._events.append(Broken(reason))
        self.stage, self._proposal, self._pending, self._installed = "outside", None, None, False
        self._guest, self.reason = True, reason
        self.fresh, self._incarnation = True, os.urandom(8)
        self._next_join = now + self.limits.suspect_seconds * ((1 << min(self._outside_before, 6)) - 1)
        self._outside_before += 1
        self.suspects.clear()
        self._joiners.clear()
        self._events.append(Outside(reason))

    def _knock(self, now: float) -> None:
        if now < self._next_join:
            return
        self._next_join = now + JOIN_EVERY_SECONDS
        for uid in range(self.num_nodes):
            if uid != self.uid:
                self._say(uid, Join, None, PROTOCOL_VERSION, self._digest, self.num_nodes, self._incarnation)

    def _watch(self, waiting_for: Iterable[int], waiting_seconds: float, now: float) -> None:
        """Ask those that the training waits for whether they live."""
        watched = set(waiting_for) & set(self.generation.members) if waiting_seconds >= PING_AFTER_SECONDS else set()
        self._pinged = {uid: since for uid, since in self._pinged.items() if uid in watched}
        silent = [uid for uid, since in self._pinged.items() if now - since > self.limits.suspect_seconds]
        if silent:
            self._events += self.suspect(silent, now)
            return
        for uid in sorted(watched):
            self._pinged.setdefault(uid, now)
            self._say(uid, Ping)

    def _forgive(self, now: float) -> None:
        self._heard = now
        self._pinged.clear()
        if self._proposal is not None:
            self._proposal.heard = dict.fromkeys(self._proposal.heard, now)
            self._proposal.committed_at = now

    def _say(self, to: int, kind: type[Message], number: int | None = None, *values: object) -> None:
        number = self.generation.number if number is None else number
        self.outbox.append((to, kind(self.run, number, self.uid, *values)))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
