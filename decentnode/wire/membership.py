"""How nodes agree on the next generation of members when some died, froze or came back. No sockets, no threads.

Whoever misses a member names it to the lowest uid among the others. That one prepares a generation: every member of it
promises to begin no further round, says how far it is, puts away what belonged to the old generation once all have
promised (commit), and goes on when everybody is ready. A stage is said again at every tick until it is answered, so
that nothing depends on a single message; whoever is silent for `suspect_seconds` is left out of the next attempt, the
lowest uid included. A node follows only the highest name that it promised. Why that is safe: wire/generation.py.

Who is missed is known in three ways, which are kept apart. Suspects do not answer; they may be alive, and are
forgotten when a generation with them comes into force. The failed said so themselves, or their supervisor did: they are
dead until they come back from outside, whatever was promised meanwhile. Those that left said goodbye when no round was
left for them; a goodbye before that is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Literal

from decentnode.errors import PeerFault
from decentnode.wire.codec import bitmap, from_bitmap
from decentnode.wire.generation import (
    FIRST,
    Broken,
    Generation,
    GenerationEvent,
    Going,
    Install,
    JoinRefused,
    Limits,
    Name,
    Outside,
    new_origin,
    proposer_of,
)
from decentnode.wire.messages import (
    NO_RUN,
    PROTOCOL_VERSION,
    Bye,
    Commit,
    Current,
    Denied,
    Go,
    Join,
    Message,
    Ping,
    Pong,
    Prepare,
    Promise,
    Ready,
    Suspect,
    fitting,
)
from decentnode.wire.proposal import Proposal, Rivals, Watch

JOIN_EVERY_SECONDS = 0.5
MAX_LEAP = 1 << 20
"""A message may name a generation so much higher than those known here: without a bound, one wrong message could use up
all numbers."""

Stage = Literal["steady", "suspecting", "short", "preparing", "promised", "committing", "committed", "outside"]
"""suspecting: waiting for the one that leads; short: leading, but too few are left; promised, committed: following;
preparing, committing: leading."""


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
        """Members that do not answer."""
        self.failed: set[int] = set()
        """Nodes whose processes are dead."""
        self.left: set[int] = set()
        """Nodes that said goodbye when no round was left."""
        self.stopping = False
        """The owner's to set: a stop was asked for. It is not taken back."""
        self.position = 0
        """Rounds that are over here as soon as the one under way is."""
        self.fresh = False
        self.coordinator = uid
        self.promised: Name = FIRST
        """The highest name that this node promised to follow, or proposed."""
        self.reason = ""
        """Why the generation in force ended, or why none can follow it."""
        self._digest, self._describe = digest, describe
        self._guest = False
        """Whether this node came from outside and is in no generation yet."""
        self._events: list[GenerationEvent] = []
        self._seen: Name = FIRST
        self._pending: Generation | None = None
        self._installed = False
        self._proposal: Proposal | None = None
        self._heard = 0.0
        """When the coordinator last spoke, or was first asked."""
        self._yields_until = 0.0
        """While suspecting, when not 0: until then another one may lead undisturbed."""
        self._joiners: set[int] = set()
        self._watch = Watch(limits.suspect_seconds)
        self._rivals = Rivals(num_nodes, limits)
        self._next_join = 0.0
        self._outside_before = 0
        """How often this node was outside: it comes back later every time, lest a bad link breaks every generation."""
        self._current: dict[int, Name] = {}
        """From outside: which generation each of the others said to be in."""
        self._last_tick: float | None = None

    # -- what the owner says ----------------------------------------------------------------------------------

    @property
    def steady(self) -> bool:
        return self.stage == "steady"

    @property
    def belongs_to(self) -> Generation:
        """The generation that messages of this node are of: the one in force, or that it got ready for."""
        return self._pending if self._pending is not None and self._installed else self.generation

    def suspect(self, uids: Collection[int], now: float, reason: str = "", dead: bool = False) -> list[GenerationEvent]:
        """These do not answer, though they are waited for; or (dead) their processes have ended."""
        self.left -= set(uids)
        self._suspect(set(uids), now, reason, dead)
        return self._taken()

    def _suspect(self, uids: set[int], now: float, reason: str = "", dead: bool = False) -> None:
        if self.stage == "outside":
            return
        if dead:
            self.failed |= uids - {self.uid}
            self._joiners -= uids
            self.left -= uids  # its goodbye came before its failure was known
        known = set(self.generation.members) if self._proposal is None else self._proposal.members
        new = uids & known - self.suspects - self.left - {self.uid}
        if not new:
            return
        self.suspects |= new
        if self.stage == "steady":
            self._break(reason or f"{', '.join(map(self._describe, sorted(new)))} does not answer")
        following = self.stage in ("promised", "committed") and self.coordinator not in new
        if not following:
            self._turn(now)

    def leave(self, now: float, reason: str) -> list[GenerationEvent]:
        """Come from outside: a restarted process, or one that the others went on without."""
        self._go_outside(now, reason)
        return self._taken()

    def fail(self) -> None:
        """This process ends: tell everybody, so that nobody has to find out."""
        generation = self.belongs_to
        for uid in generation.members:
            if uid != self.uid:
                self._say(uid, Suspect, generation.name, bitmap([self.uid], self.num_nodes), int(self.stopping))

    def installed(self, generation: Generation, now: float) -> list[GenerationEvent]:
        """What belonged to the generation before is put away."""
        if self._pending is None or self._pending.name != generation.name:
            return self._taken()
        self._installed = True
        if self.stage == "committing":
            assert self._proposal is not None
            self._proposal.ready.add(self.uid)
            self._check_ready(now)
        elif self.stage == "committed":
            self._say(self.coordinator, Ready, generation.name)
        return self._taken()

    def tick(self, now: float, waiting_for: Iterable[int] = (), waiting_seconds: float = 0.0) -> list[GenerationEvent]:
        """A few times per second. waiting_for: whom the training waits for, and for how long already."""
        if self._last_tick is not None and now - self._last_tick > self.limits.suspect_seconds / 2:
            self._forgive(now)  # this process did not run: that is nobody else's silence
        self._last_tick = now
        self._rivals.expire(now)
        if self._rivals and self.stage != "outside":
            self._ping_all()  # somebody is in another generation: so are how many?
        if self.stage == "steady":
            self._look_after(waiting_for, waiting_seconds, now)
        elif self.stage == "suspecting" and self._yields_until:
            if now >= self._yields_until:
                self._turn(now)
        elif self.stage == "suspecting":
            self._ask(now)
        elif self.stage in ("preparing", "committing"):
            self._lead(now)
        elif self.stage == "outside":
            self._request_join(now)
        elif self.stage == "short":
            if self.stopping:
                self._turn(now)  # to close, any number is enough
            else:
                self._ping_all()  # whoever went on without this node says so
        elif now - self._heard > self.limits.suspect_seconds:
            self.suspects.add(self.coordinator)
            self._turn(now)
        else:
            self._follow()
        return self._taken()

    # -- messages ---------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[GenerationEvent]:
        """Raises PeerFault for what may not be said; nothing changes then."""
        source = message.source
        if source >= self.num_nodes or source == self.uid:
            raise PeerFault("unknown_uid", str(source))
        joining = isinstance(message, Join) or (self.stage == "outside" and self.run == NO_RUN)
        if message.run != self.run and not joining:
            raise PeerFault("wrong_run", f"{type(message).__name__} of run {message.run.hex()}")
        known = max(self.generation.name, self.promised)[0]
        if message.generation > known + MAX_LEAP and not self.fresh:
            raise PeerFault("wrong_generation", f"{message.generation} after {known}")
        if not self._guest or isinstance(message, Prepare | Commit | Go | Current | Denied):
            getattr(self, f"_on_{type(message).__name__.lower()}")(message, now)
        return self._taken()

    def _on_ping(self, ping: Ping, now: float) -> None:  # noqa: ARG002
        if ping.source in self.generation.members:
            self._say(ping.source, Pong)
        else:
            self._tell_current(ping)

    def _on_pong(self, pong: Pong, now: float) -> None:
        if _name(pong) == self.generation.name:  # who lives, but is in another generation, is missed in this one
            self._watch.answered(pong.source)
        if self.stage == "suspecting" and pong.source == self.coordinator:
            self._heard = now
        elif self.stage == "short" and pong.source in self.suspects:
            self.suspects.discard(pong.source)
            self._turn(now)

    def _on_bye(self, bye: Bye, now: float) -> None:
        if _name(bye) not in (self.generation.name, self.promised) or bye.source in self.failed:
            return
        if not self._over():
            self._suspect({bye.source}, now, f"{self._describe(bye.source)} left before the last round", dead=True)
        elif bye.source not in self.suspects:
            self.left.add(bye.source)
            if self.stage in ("suspecting", "promised", "committed") and self.coordinator == bye.source:
                self._turn(now)

    def _over(self) -> bool:
        """Whether this node begins no further round, so that others of its generation may have finished."""
        return self.stopping or self.position >= self.limits.rounds

    def _on_join(self, join: Join, now: float) -> None:
        reason = self._refusal(join)
        if reason:
            self._say(join.source, Denied, None, join.digest, fitting(reason))
            raise PeerFault("wrong_config", reason)
        if _name(join) != self.generation.name:
            self._tell_current(join)
            return
        if join.source in self._joiners:
            return
        if not self.stopping:  # else nobody is let in any more
            self._joiners.add(join.source)
        self.left.discard(join.source)
        self.failed.discard(join.source)
        if join.source in self.generation.members:  # its old process is gone
            self._suspect({join.source}, now, f"{self._describe(join.source)} was started again")
        if self.stage == "short" and self._joiners:
            self._turn(now)
        self._admit(now)

    def _refusal(self, join: Join) -> str:
        who = self._describe(join.source)
        if join.version != PROTOCOL_VERSION:
            return f"{who} asks to join with protocol {join.version}, the run speaks {PROTOCOL_VERSION}"
        if join.num_nodes != self.num_nodes:
            return f"{who} asks to join with {join.num_nodes} nodes in its graph, the run has {self.num_nodes}"
        if join.digest != self._digest:
            return (
                f"{who} asks to join with another config or graph (digest {join.digest}, the run has {self._digest})"
            )
        return ""

    def _on_suspect(self, suspect: Suspect, now: float) -> None:
        if suspect.source not in self.generation.members:
            self._tell_current(suspect)
            return
        uids = from_bitmap(suspect.uids, self.num_nodes)
        self._say(suspect.source, Pong)
        self.stopping |= bool(suspect.stopping) and _name(suspect) == self.generation.name
        failed = suspect.source in uids and _name(suspect) in (self.generation.name, self.promised)
        if failed:
            self._suspect({suspect.source}, now, f"{self._describe(suspect.source)} failed", dead=True)
        if self.stage in ("promised", "committed"):
            return  # whoever leads already hears for itself who answers
        if self._proposal is not None and suspect.source not in self._proposal.members:
            return
        if _name(suspect) == self.generation.name and not failed:
            who = ", ".join(map(self._describe, sorted(uids)))
            self._suspect(uids, now, f"{who} does not answer {self._describe(suspect.source)}")
            if self.stage == "steady":  # nobody of it is missed here, but it is over for whoever asks
                self._break(f"{self._describe(suspect.source)} asks for another generation")
                self._turn(now)

    def _on_prepare(self, prepare: Prepare, now: float) -> None:
        name, members = _name(prepare), from_bitmap(prepare.members, self.num_nodes)
        if self.uid not in members:
            return
        if prepare.source not in members or not self._is_of(prepare.source, name):
            raise PeerFault("wrong_sender", f"generation {prepare.generation} prepared by {prepare.source}")
        if self.steady and prepare.source not in self.generation.members:  # it was left behind, and does not know it
            self._tell_current(prepare)
            return
        if name < self.promised or name[0] <= self.generation.number:
            self._say_promise(prepare.source)
            return
        if self.stage == "steady":
            self._break(f"{self._describe(prepare.source)} prepares generation {prepare.generation}")
        if name > self.promised or self.stage not in ("promised", "committed"):
            self.run = prepare.run
            self.promised, self.coordinator, self.stage = name, prepare.source, "promised"
            self.suspects -= members
            self._proposal, self._pending, self._installed = None, None, False
            self._yields_until = 0.0
        self._heard = now
        self._follow()

    def _on_promise(self, promise: Promise, now: float) -> None:
        proposal = self._proposal
        if proposal is None or _name(promise) != proposal.name:  # it promised somebody else
            self._seen = max(self._seen, _name(promise))
        if proposal is None or promise.source not in proposal.members:
            return
        proposal.heard[promise.source] = now
        if self.stage == "preparing" and _name(promise) == proposal.name:
            proposal.promises[promise.source] = promise
            self._check_promises(now)

    def _on_commit(self, commit: Commit, now: float) -> None:
        if not self._follows(commit):
            return
        self._heard = now
        if self.stage == "promised":
            members = tuple(sorted(from_bitmap(commit.members, self.num_nodes)))
            fresh = frozenset(from_bitmap(commit.fresh, self.num_nodes))
            self._pending = Generation(
                commit.generation, members, commit.first_round, fresh, commit.origin, bool(commit.stopping)
            )
            self.stage = "committed"
            self._events.append(Install(self._pending))
        self._follow()

    def _on_ready(self, ready: Ready, now: float) -> None:
        proposal = self._proposal
        if proposal is not None and _name(ready) == proposal.name and ready.source in proposal.members:
            proposal.heard[ready.source] = now
            if self.stage == "committing":
                proposal.ready.add(ready.source)
                self._check_ready(now)
        elif self.stage == "steady" and _name(ready) == self.generation.name:
            self._say(ready.source, Go)

    def _on_go(self, go: Go, now: float) -> None:
        if self._follows(go) and self.stage == "committed" and self._installed:
            self._enter(now)

    def _on_current(self, current: Current, now: float) -> None:
        name, members = _name(current), from_bitmap(current.members, self.num_nodes)
        if current.source not in members:
            raise PeerFault("wrong_sender", f"{current.source} is not of its own generation {current.generation}")
        if self._guest:
            known = self._current.get(current.source, FIRST)
            self._current[current.source] = name
            if self.stage == "outside" and known != name and now + JOIN_EVERY_SECONDS >= self._next_join:
                self._ask_in(current.source)
            return
        own = self.generation.name
        about = (current.about_generation, current.about_origin)
        if about not in (own, self.promised) or self.uid in members or self.stage in ("promised", "committed"):
            return
        self._seen = max(self._seen, name)
        outvoted = current.steady and self._rivals.heard(name, current.source, now, own)
        if outvoted or (self.stage == "short" and name > own):
            self._go_outside(now, f"the others went on without this node, in generation {current.generation}")

    def _on_denied(self, denied: Denied, now: float) -> None:  # noqa: ARG002
        if self.stage == "outside" and denied.digest == self._digest:
            self._events.append(JoinRefused(f"refused by {self._describe(denied.source)}: {denied.reason}"))

    @staticmethod
    def _is_of(proposer: int, name: Name) -> bool:
        return proposer_of(name[1]) == proposer

    def _follows(self, message: Message) -> bool:
        """Whether this comes from the one that this node promised to follow, about what it promised."""
        following = self.stage in ("promised", "committed")
        return following and _name(message) == self.promised and message.source == self.coordinator

    def _tell_current(self, message: Message) -> None:
        """To somebody of no, or of another generation: which one this node is in, unless it is about to close."""
        if not self.stopping and not self.generation.stopping:
            members = bitmap(self.generation.members, self.num_nodes)
            self._say(message.source, Current, None, members, int(self.steady), message.generation, message.origin)

    # -- stages -----------------------------------------------------------------------------------------------

    def _break(self, reason: str) -> None:
        self.stage, self.reason = "suspecting", reason
        self._yields_until = 0.0
        self._watch.clear()
        self._events.append(Broken(reason))

    def _inside(self) -> set[int]:
        """Members of the generation that are still counted on."""
        return set(self.generation.members) - self.suspects - self.failed - self.left

    def _turn(self, now: float) -> None:
        """Whoever led, if anybody, is out: the lowest uid of those left leads."""
        if self._guest:
            self._go_outside(now, f"{self._describe(self.coordinator)} did not let this node in")
            return
        self.stage, self._proposal, self._pending, self._installed = "suspecting", None, None, False
        self._yields_until = 0.0
        first = min(self._inside() | {self.uid})
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
            missed = (self.suspects | self.failed) - {self.uid}
            self._say(self.coordinator, Suspect, None, bitmap(missed, self.num_nodes), int(self.stopping))

    def _admit(self, now: float) -> None:
        """Let in whoever asked, where that is this node's to do and nothing else is under way."""
        if self.stage == "steady" and self._joiners and self.uid == min(self._inside() | {self.uid}):
            names = ", ".join(map(self._describe, sorted(self._joiners)))
            self._break(f"{names} asked to join")
            self._propose(now)

    def _propose(self, now: float) -> None:
        joiners = set() if self.stopping else self._joiners
        members = frozenset(self._inside() | joiners | {self.uid})
        if len(members | self.left) < self.limits.min_nodes and not self.stopping:
            self._fall_short()
            return
        number = max(self.generation.number, self.promised[0], self._seen[0]) + 1
        name = self.promised = self._new_name(number)
        self.coordinator, self.stage = self.uid, "preparing"
        self._proposal = Proposal(name, members, dict.fromkeys(members - {self.uid}, now))
        self._proposal.promises[self.uid] = self._promise()
        self._check_promises(now)
        self._say_stage()

    def _new_name(self, number: int) -> Name:
        return number, new_origin(self.uid)

    def _fall_short(self) -> None:
        gone = ", ".join(map(self._describe, sorted((self.suspects | self.failed) - self._joiners)))
        self.stage, self._proposal = "short", None
        self.reason = (
            f"{gone or 'who left'} does not answer, and a generation needs {self.limits.min_nodes} of {self.num_nodes} "
            f"nodes (node.min_nodes)"
        )

    def _lead(self, now: float) -> None:
        """At every tick of a proposal: leave out who is silent, else say the stage again."""
        proposal = self._proposal
        assert proposal is not None
        silent = proposal.silent(now, self.limits, self.stage == "committing") - self.left - {self.uid}
        outbid = self._seen[0] >= proposal.name[0]
        if outbid and proposer_of(self._seen[1]) < self.uid:
            # Two lead that do not hear each other: did both bid higher at once, neither would ever come through.
            self.stage, self._proposal, self._pending, self._installed = "suspecting", None, None, False
            self._yields_until = now + self.limits.suspect_seconds
        elif silent or outbid or proposal.members & self.left:
            self.suspects |= silent
            self._joiners -= silent
            self._turn(now)
        else:
            self._say_stage()

    def _say_stage(self) -> None:
        proposal = self._proposal
        if proposal is None:
            return
        members, pending = bitmap(proposal.members, self.num_nodes), self._pending
        for uid in sorted(proposal.members - {self.uid}):
            if self.stage == "preparing":
                self._say(uid, Prepare, proposal.name, members)
            elif pending is not None:
                fresh = bitmap(pending.fresh, self.num_nodes)
                self._say(uid, Commit, proposal.name, members, fresh, pending.first_round, int(pending.stopping))

    def _check_promises(self, now: float) -> None:
        proposal = self._proposal
        if proposal is None or self.stage != "preparing" or not proposal.promised_by_all():
            return
        generation = proposal.outcome()
        if generation is None:
            self._go_outside(now, "no node that is left has a model")
            return
        if not self._enough(generation):
            self._fall_short()
            return
        self._pending, self._installed, self.stage, proposal.committed_at = generation, False, "committing", now
        self._say_stage()
        self._events.append(Install(generation))

    def _enough(self, generation: Generation) -> bool:
        """Whether a generation may come into force: rounds need `min_nodes` that are there (wire/generation.py, 2)."""
        counted = set(generation.members)
        if generation.first_round >= self.limits.rounds:
            counted |= self.left
        return generation.stopping or len(counted) >= self.limits.min_nodes

    def _check_ready(self, now: float) -> None:
        proposal = self._proposal
        if proposal is None or self.stage != "committing" or proposal.ready != proposal.members:
            return
        for uid in sorted(proposal.members - {self.uid}):
            self._say(uid, Go, proposal.name)
        self._enter(now)

    def _follow(self) -> None:
        """Say again what the coordinator waits for."""
        if self.stage == "committed" and self._installed:
            self._say(self.coordinator, Ready, self.promised)
        elif self.stage in ("promised", "committed"):
            self._say_promise(self.coordinator)

    def _promise(self) -> Promise:
        number, origin = self.promised
        return Promise(
            self.run, number, self.uid, self.position, int(self.fresh), int(self.stopping), origin=origin
        )

    def _say_promise(self, to: int) -> None:
        self.outbox.append((to, self._promise()))

    def _enter(self, now: float) -> None:
        assert self._pending is not None
        self.generation, self._pending, self._proposal = self._pending, None, None
        generation, members = self.generation, set(self.generation.members)
        self.stage, self._installed, self.position = "steady", False, generation.first_round
        self._guest = False
        self.stopping |= generation.stopping
        self._joiners.clear()
        self._rivals.clear()
        self._watch.clear()
        self.suspects.clear()
        self.left -= members
        self.failed -= generation.fresh
        self._events.append(Going(generation))
        dead = self.failed & members
        if dead:  # it failed after it had got ready
            self._suspect(dead, now, f"{', '.join(map(self._describe, sorted(dead)))} failed")

    def _go_outside(self, now: float, reason: str) -> None:
        if self.stage == "steady":
            self._events.append(Broken(reason))
        self.stage, self._proposal, self._pending, self._installed = "outside", None, None, False
        self._guest, self.fresh, self.reason = True, True, reason
        self._next_join = now + self.limits.suspect_seconds * ((1 << min(self._outside_before, 6)) - 1)
        self._outside_before += 1
        for names in (self.suspects, self.failed, self._joiners, self._rivals, self._current):
            names.clear()
        self._events.append(Outside(reason))

    def _request_join(self, now: float) -> None:
        if now < self._next_join:
            return
        self._next_join = now + JOIN_EVERY_SECONDS
        for uid in range(self.num_nodes):
            if uid != self.uid:
                self._ask_in(uid)

    def _ask_in(self, uid: int) -> None:
        name = self._current.get(uid, FIRST)
        self._say(uid, Join, name, PROTOCOL_VERSION, self._digest, self.num_nodes)

    def _look_after(self, waiting_for: Iterable[int], waiting_seconds: float, now: float) -> None:
        """Ask those that the training waits for whether they live."""
        watched = set(waiting_for) & set(self.generation.members)
        asked, silent = self._watch.ask(watched, waiting_seconds, now)
        if silent:
            self.left -= set(silent)
            self._suspect(set(silent), now)
        for uid in asked:
            self._say(uid, Ping)

    def _ping_all(self) -> None:
        for uid in range(self.num_nodes):
            if uid != self.uid:
                self._say(uid, Ping)

    def _forgive(self, now: float) -> None:
        self._heard = now
        self._watch.clear()
        if self._proposal is not None:
            self._proposal.forgive(now)

    def _say(self, to: int, kind: type[Message], name: Name | None = None, *values: object) -> None:
        number, origin = self.generation.name if name is None else name
        self.outbox.append((to, kind(self.run, number, self.uid, *values, origin=origin)))

    def _taken(self) -> list[GenerationEvent]:
        events, self._events = self._events, []
        return events


def _name(message: Message) -> Name:
    return message.generation, message.origin
