"""Applies the events of a node's `Membership` to its transport, and waits for the next generation. No I/O.

generations/generations.py lets one thread call it at a time, and blocks. now: seconds of any monotonic clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import replace

from decentnode.communication.counters import Counters
from decentnode.communication.run_state import STOPPING_TIMEOUT_SECONDS, RunFacts
from decentnode.communication.zeromq.protocol.link_sender import LinkSender
from decentnode.errors import LARGE_PACKETS, AssemblyError, Interrupted, NoGeneration, PeerFault
from decentnode.wire.bounds import fitting
from decentnode.wire.generation import (
    Broken,
    Caller,
    Generation,
    GenerationEvent,
    Install,
    JoinRefused,
    Outside,
    Seated,
)
from decentnode.wire.invitation import Invitation
from decentnode.wire.membership import Membership
from decentnode.wire.messages import (
    MAX_AGE_MILLISECONDS,
    NO_RUN,
    Asked,
    Declined,
    Described,
    Granted,
    Inquiry,
    Knock,
    Message,
    Resign,
)

logger = logging.getLogger(__name__)

STOPPED_OUTSIDE_SECONDS = 0.25
"""How long a node outside still waits to be admitted once the run is to stop."""
RENEW_SECONDS = 2.0
"""How long a node is in one of ALONE_STAGES before it makes new control connections, because its old ones may be dead.
The time doubles with every repetition, because it may be the other nodes that are dead."""
MAX_LOGGED_STRANGERS = 3
"""How many newcomers without a valid invitation are logged."""
ALONE_STAGES = ("short", "outside", "suspecting")
"""The stages in which a node hears from no other node with which it could continue."""


class Reconfiguration:
    """Connects one node's `Membership` with its links and the state of its run.

    `RunFacts.regrouping` is set from the moment when a generation ends until the next one is in force: meanwhile every
    wait of the training thread ends, and no round begins.
    """

    def __init__(
        self, membership: Membership, sender: LinkSender, facts: RunFacts, counters: Counters, wake: Callable[[], None]
    ) -> None:
        """wake: called when a wait of the training thread may be over; not blocking."""
        self.membership = membership
        self.active = False
        """Whether the run has begun; before that, the session handles missing nodes."""
        self.alone_since: float | None = None
        """Since when this node has been in one of ALONE_STAGES; None while it is in another stage."""
        self._renew_after = RENEW_SECONDS
        """Seconds after `alone_since` at which new control connections are made."""
        self.facts, self.counters = facts, counters
        self.is_catching_up = False
        """Whether the current round is one that the other members have already finished, so that they wait for it."""
        self._stopping = False
        facts.watches = True
        membership.watch.load = sender.slowness
        self._sender, self._wake = sender, wake
        self.to_install: Generation | None = None
        """A generation that was agreed on and that this node has not installed yet."""
        self.seated: Callable[[Seated], None] = lambda _seat: None
        """Called with the endpoints of a newcomer; the owner sets it."""
        self.config_text = b""
        """The experiment (YAML) that newcomers are sent."""
        self.began: Callable[[], float | None] = lambda: None
        """Returns when the run began (`Communication.run_began`), for newcomers; the owner sets it."""
        self.admission: Callable[[str, str], Invitation | None] = lambda _text, _key: None
        """admission(invitation, key) returns the verified invitation of a newcomer, or None if it needs none. Raises
        PeerFault ("uninvited"). The owner sets it."""
        self.founder_keys = frozenset[str]()
        """Public keys of the nodes in the mapping."""
        self.control_of: Callable[[int], str] = lambda _uid: ""
        """Returns where a member's control socket listens (tcp://...), for newcomers; the owner sets it."""
        self.in_force: Generation | None = None
        """A generation that is in force and that this node has not begun yet."""
        self.fruitless_since: float | None = None
        """Since when this node has been waiting for generations, all with members with whom it had already begun no
        round: messages about members arrive, but models do not. None if it is in a round."""
        self._tried_members: set[tuple[int, ...]] = set()
        """The members of the generations since the last round, which alternate if two nodes cannot get a model."""

    @property
    def generation(self) -> Generation:
        """The generation in force, or the last that was."""
        return self.membership.generation

    # -- messages and ticks -----------------------------------------------------------------------------------

    def begin(self, run: bytes) -> None:
        """Notes that every node has joined, so that generation 0 is in force."""
        self.membership.run, self.active = run, True

    def receive(self, message: Message, now: float) -> None:
        """Handles a membership message or a Bye. Raises PeerFault for a message that its sender may not send."""
        if self.active:
            try:
                self._apply(self.membership.receive(message, now), now)
            finally:
                self._apply([], now)  # a refused message may have an answer, too

    @property
    def next_deadline(self) -> float:
        """The latest time at which `tick` has to be called; infinite if nothing is due."""
        if not self.active:
            return math.inf
        waiting = self.facts.nodes_to_ping
        due = self.membership.next_deadline(None if waiting is None else waiting[1])
        return due if self.alone_since is None else min(due, self.alone_since + self._renew_after)

    def tick(self, now: float) -> None:
        """Does what is due. To be called at `next_deadline` at the latest."""
        if self.active:
            waiting = self.facts.nodes_to_ping
            whom, since = ((), math.inf) if waiting is None else waiting
            self._apply(self.membership.tick(now, whom, since), now)
            if self.alone_since is not None and now >= self.alone_since + self._renew_after:
                self._renew_after *= 2
                self._sender.renew_control()

    def stop(self, now: float) -> None:
        """Notes that the run is to stop: this node no longer waits for others to come back."""
        if not self.membership.stopping:
            self._apply(self.membership.stop(now), now)

    def _apply(self, events: list[GenerationEvent], now: float) -> None:
        for event in events:
            if isinstance(event, Broken):
                logger.warning("generation %d is over: %s", self.generation.number, event.reason)
                self._report("generation_over", event.reason)
                self.facts.regrouping = event.reason
                self._wake()
            elif isinstance(event, Outside):
                logger.warning("outside: %s", event.reason)
                self._report("outside", event.reason)
                self.to_install = None
            elif isinstance(event, Seated):
                self.seated(event)
            elif isinstance(event, JoinRefused):
                self._report("refused", event.reason)
                uid = self.membership.uid
                self.facts.failure = self.facts.failure or AssemblyError(f"node {uid} was {event.reason}", [uid])
                self._wake()
            else:
                if isinstance(event, Install):
                    self.to_install, self.in_force = event.generation, None
                else:
                    self.in_force = event.generation
                self._wake()
        self._note_stage(now)
        outbox, self.membership.outbox = self.membership.outbox, []
        for uid, message in outbox:
            self._sender.send_once(uid, message)

    def _note_stage(self, now: float) -> None:
        """Updates `alone_since` and wakes the training thread, after every call that may change the stage."""
        if self.membership.stopping and not self._stopping:
            self._stopping = True
            self._wake()
        if self.membership.stage not in ALONE_STAGES:
            self.alone_since, self._renew_after = None, RENEW_SECONDS
        elif self.alone_since is None:
            self.alone_since = now
            self._wake()

    def _report(self, kind: str, detail: str) -> None:
        self.counters.on_event(kind, None, detail)

    def knocked(self, asked: Asked, caller: Caller, now: float) -> Granted | Described | Declined:
        """Answers a node that is not in the mapping. Raises PeerFault for a malformed request."""
        membership, own, run = self.membership, self.membership.uid, self.membership.run
        if not self.active:
            return Declined(NO_RUN, 0, own, "the run has not begun", 0, own, "")
        if isinstance(asked, Resign):
            return self._with_address(membership.newcomers.handle_resign(asked))
        if caller.key and caller.key in self.founder_keys:
            return Declined(run, 0, own, "its key is that of a node in the mapping", 1, own, "")
        try:
            invitation = self.admission(asked.invitation, caller.key)
        except PeerFault as fault:
            self._refuse_newcomer(fault, asked, caller)
            return Declined(run, 0, own, fitting(fault.detail), 1, own, "")
        if isinstance(asked, Inquiry):
            described = Described(run, membership.generation.number, own, membership.digest, self.config_text)
            return membership.newcomers.why_closed() or described
        return self._seat_for(asked, caller, now, invitation)

    def _seat_for(self, knock: Knock, caller: Caller, now: float, invitation: Invitation | None) -> Granted | Declined:
        membership, own, run = self.membership, self.membership.uid, self.membership.run
        answer = membership.newcomers.knock(knock, caller, now, invitation)
        try:
            if isinstance(answer, Declined):
                self._report("turned_away", f"{knock.control}: {answer.reason}")
                return self._with_address(answer)
            seat, uid = answer
            self._report("knocked", f"node {uid} at {seat.control}")
            began = self.began()
            age = 0 if began is None else round(1000 * (now - began))
            return Granted(
                run, membership.generation.number, own, uid, seat.token, membership.seats.encoded(), self.config_text,
                min(max(0, age), MAX_AGE_MILLISECONDS - 1),
            )  # fmt: skip
        finally:
            self._apply(membership.take_events(now), now)

    def _with_address(self, turned: Declined) -> Declined:
        """Adds the address of the node that is to be asked instead, if it is another one."""
        return turned if turned.uid == self.membership.uid else replace(turned, at=self.control_of(turned.uid))

    def _refuse_newcomer(self, fault: PeerFault, asked: Knock | Inquiry, caller: Caller) -> None:
        """Counts a newcomer without a valid invitation, and logs the first few."""
        listens = asked.control if isinstance(asked, Knock) else ""
        who = f"{listens}{f' (from {caller.address})' if caller.address else ''}".strip()
        known = self.counters.faults.get(fault.reason, 0)
        self.counters.fault(fault.reason, None, f"{who}: {fault.detail}")
        if known < MAX_LOGGED_STRANGERS:
            logger.warning("a node at %s is not admitted: %s", who, fault.detail)

    # -- calls of the transport -------------------------------------------------------------------------------

    def suspect(self, uids: Collection[int], reason: str, now: float, *, dead: bool = False) -> None:
        """Reports nodes that do not answer or, with `dead`, whose processes ended. Once this returns, no round of the
        generation begins on this node."""
        if self.active:
            known = self.membership.suspects | self.membership.failed
            for uid in sorted({*uids} & {*self.generation.members} - known):
                self.counters.on_event("suspected", uid, reason)
            self._apply(self.membership.suspect(uids, now, reason, dead), now)

    def renew(self, reason: str, now: float) -> None:
        """Asks for a new generation though no member is known to be absent, because the members cannot continue in this
        one."""
        if self.active:
            self._apply(self.membership.renew(now, reason), now)

    def fail(self, now: float) -> None:
        """Tells all members that this node failed, so that they do not have to detect it."""
        if self.active:
            self.membership.fail()
            self._apply([], now)

    def leave(self, reason: str, now: float) -> None:
        """Puts this node outside: its process joins a run that has already begun."""
        self.active = True
        self.facts.regrouping = reason
        self._apply(self.membership.leave(now, reason), now)

    def enter(self, round: int) -> None:
        """Notes that a round begins; other members have already finished it if it is below the generation's first.
        Raises Regrouping if it may not begin."""
        if self.active:
            self.facts.raise_if_over()
            self.fruitless_since = None
            self._tried_members.clear()
            self.is_catching_up = round < self.generation.first_round
            self.membership.position = max(self.membership.position, round + 1)
            self.membership.last_round = self.membership.limits.rounds

    def end_after(self, rounds: int) -> None:
        """Notes that the run ends after `rounds` rounds, unless a later `enter` shows that the members of the next
        generation have continued. A node that says goodbye from now on has finished like this one."""
        self.membership.position = max(self.membership.position, rounds)
        self.membership.last_round = rounds

    def begin_at(self, round: int) -> None:
        """Notes that rounds below `round` are over, so that no generation with this node begins with an earlier one."""
        self.membership.position = round

    def mark_caught_up(self) -> None:
        """Notes that this node has a model."""
        self.membership.fresh = False

    def mark_in_sync(self, generation: Generation) -> None:
        """Notes that this node now shares a common model with the members of `generation` (`MemberState.lineage`)."""
        self.membership.lineage = generation.name

    def installed(self, generation: Generation, now: float) -> None:
        """Notes that the parts of the old generation were replaced by those of `generation`."""
        self._apply(self.membership.installed(generation, now), now)

    def note_begun(self, generation: Generation) -> None:
        """Notes that this node begins `generation`, which is in force."""
        self.facts.regrouping, self.is_catching_up = "", False
        if generation.members not in self._tried_members:
            self._tried_members.add(generation.members)
            self.fruitless_since = None
        self._report("generation", f"{generation.number} of nodes {', '.join(map(str, generation.members))}")


class EndWait:
    """The wait of a node that misses another one, until it knows whether its generation is over (`run_state.Wait`)."""

    def __init__(self, facts: RunFacts, seconds: float, now: float) -> None:
        """seconds: the longest wait."""
        self._facts = facts
        self.deadline = now + seconds

    def step(self, now: float) -> bool:
        """Returns whether the wait is over; raises nothing."""
        return bool(self._facts.regrouping) or self._facts.failure is not None or now >= self.deadline


class GenerationWait:
    """The wait of a node for its next generation (`run_state.Wait`), which is in `generation` once the wait is over."""

    def __init__(
        self, reconfiguration: Reconfiguration, alone_seconds: float, together_seconds: float,
        install: Callable[[Generation], None], now: float,
    ) -> None:
        """install(generation): replaces the parts of the old generation by those of this one; not blocking.

        alone_seconds, together_seconds: see `step`.
        """
        self._reconfiguration, self._install = reconfiguration, install
        self._alone_seconds, self._together_seconds = alone_seconds, together_seconds
        self._began = self.deadline = now
        if reconfiguration.fruitless_since is None:
            reconfiguration.fruitless_since = now
        self._fruitless_since = reconfiguration.fruitless_since
        self._asks_at = -math.inf
        """When this node asked to be admitted for the first time, or will: until then nobody can admit it."""
        self._is_fruitless = self._fruitless_since < now
        self._why_over = reconfiguration.facts.regrouping
        self.generation: Generation | None = None

    def step(self, now: float) -> bool:
        """Returns whether the next generation is in force.

        Raises NoGeneration if there is none after `alone_seconds` without enough other nodes, or after
        `together_seconds` in total, to which earlier waits count if members only repeat and no round began since. If
        the run is to stop, raises Interrupted after STOPPED_OUTSIDE_SECONDS if this node is outside, and after
        STOPPING_TIMEOUT_SECONDS if it hears from no node that would close with it. Raises AssemblyError if this node is
        refused.
        """
        reconfiguration, membership = self._reconfiguration, self._reconfiguration.membership
        reconfiguration.facts.raise_if_failed()
        if reconfiguration.to_install is not None:
            generation, reconfiguration.to_install = reconfiguration.to_install, None
            self._install(generation)
            reconfiguration.installed(generation, now)
        going, reconfiguration.in_force = reconfiguration.in_force, None
        if going is not None and membership.steady:
            reconfiguration.note_begun(going)
            self.generation = going
            return True
        self._raise_if_hopeless(now)
        return False

    @property
    def has_news(self) -> bool:
        """Whether the next step has something to do other than checking the deadline."""
        return self._reconfiguration.to_install is not None or self._reconfiguration.in_force is not None

    def _raise_if_hopeless(self, now: float) -> None:
        """Raises if the wait has no chance of success any more, and updates `deadline`."""
        reconfiguration, membership = self._reconfiguration, self._reconfiguration.membership
        outside = membership.stage == "outside"
        if outside:
            self._asks_at = membership.joining.begins_at
        began = self._began if membership.stopping else max(self._began, self._asks_at)
        since = now if reconfiguration.alone_since is None else max(reconfiguration.alone_since, began)
        patience = self._alone_seconds
        if membership.stopping:
            patience = min(patience, STOPPED_OUTSIDE_SECONDS if outside else STOPPING_TIMEOUT_SECONDS)
        self.deadline = min(math.inf if reconfiguration.alone_since is None else since + patience,
                            (self._fruitless_since if self._is_fruitless else began) + self._together_seconds)
        if now < self.deadline:
            return
        reason = membership.reason
        if outside:
            reason += f"; {membership.why_not_admitted()}"
        elif membership.stage != "short" and membership.coordinator != membership.uid:
            reason += f"; {membership.describe(membership.coordinator)} had to begin one"
        if membership.stopping and now - since >= patience:
            raise Interrupted(f"node {membership.uid}: stopped while {reason}")
        if self._is_fruitless and now >= self._fruitless_since + self._together_seconds:
            raise NoGeneration(
                f"node {membership.uid}: no round began in any generation for {now - self._fruitless_since:.0f} s, "
                f"although members answered: {self._why_over}; {LARGE_PACKETS}"
            )
        raise NoGeneration(
            f"node {membership.uid}: no new generation of members within {now - began:.0f} s; {reason}"
            f"{reconfiguration.counters.refused_handshakes()}"
        )
