"""Generations of a networked transport: what a node obeys of its membership, and its wait for the next one. No I/O.

`generations.py` lets one thread in at a time and blocks. now: seconds of any monotonic clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from decentnode.communication.counters import Counters
from decentnode.communication.run_state import STOPPING_TIMEOUT_SECONDS, RunFacts
from decentnode.communication.zeromq.link_sender import LinkSender
from decentnode.errors import AssemblyError, Interrupted, PeerLost
from decentnode.wire.generation import Broken, Generation, GenerationEvent, Install, JoinRefused, Outside
from decentnode.wire.membership import Membership
from decentnode.wire.messages import Message

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25


class Reconfiguration:
    """One node's part in agreeing on generations.

    `RunFacts.regrouping` is set from the moment a generation ends until the next one is in force: every wait of the
    training thread ends then, and no round begins.
    """

    def __init__(
        self, membership: Membership, sender: LinkSender, facts: RunFacts, counters: Counters, wake: Callable[[], None]
    ) -> None:
        """wake: called where a wait of the training thread may be over; not blocking."""
        self.membership = membership
        self.active = False
        """Whether the run has begun; before it, a missing node is the start's business."""
        self.stop_asked = False
        """The run is to stop; this node waits for nobody to come back any more."""
        self.facts, self.counters = facts, counters
        self._sender, self._wake = sender, wake
        self.to_install: Generation | None = None
        """A generation that is agreed on, while this node has not installed it."""
        self.going: Generation | None = None
        """A generation that all of its members have installed, while this node has not begun it."""

    @property
    def generation(self) -> Generation:
        """The one in force, or the last that was."""
        return self.membership.generation

    # -- what comes -------------------------------------------------------------------------------------------

    def begin(self, run: bytes) -> None:
        """Generation 0 is in force: everybody has joined."""
        self.membership.run, self.active = run, True

    def receive(self, message: Message, now: float) -> None:
        """A message about membership, or a Bye. Raises PeerFault."""
        if self.active:
            self._note_stop()
            try:
                self._obey(self.membership.receive(message, now))
            finally:
                self._obey([])  # an answer may belong to what is refused

    def tick(self, now: float) -> None:
        """A few times per second."""
        if self.active:
            self._note_stop()
            waiting = self.facts.waiting
            whom, since = waiting if waiting is not None else ((), now)
            self._obey(self.membership.tick(now, whom, now - since))

    def _note_stop(self) -> None:
        self.membership.stopping = self.membership.stopping or self.stop_asked or self.facts.stopping

    def _obey(self, events: list[GenerationEvent]) -> None:
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
            elif isinstance(event, JoinRefused):
                self._report("refused", event.reason)
                uid = self.membership.uid
                self.facts.failure = self.facts.failure or AssemblyError(f"node {uid} was {event.reason}", [uid])
                self._wake()
            else:
                if isinstance(event, Install):
                    self.to_install, self.going = event.generation, None
                else:
                    self.going = event.generation
                self._wake()
        outbox, self.membership.outbox = self.membership.outbox, []
        for uid, message in outbox:
            self._sender.send_once(uid, message)

    def _report(self, kind: str, detail: str) -> None:
        self.counters.on_event(kind, None, detail)

    # -- what this node finds out -----------------------------------------------------------------------------

    def suspect(self, uids: Collection[int], reason: str, now: float, *, dead: bool = False) -> None:
        """These do not answer, or (dead) have ended: once this returns, no round of the generation begins here."""
        if self.active:
            self._obey(self.membership.suspect(uids, now, reason, dead))

    def fail(self) -> None:
        """This node failed: tell everybody, so that nobody has to find out."""
        if self.active:
            self.membership.fail()
            self._obey([])

    def leave(self, reason: str, now: float) -> None:
        """Come from outside: this process joins a run that has begun."""
        self.active = True
        self.facts.regrouping = reason
        self._obey(self.membership.leave(now, reason))

    def enter(self, round: int) -> None:
        """A round begins. Raises Regrouping when it may not."""
        if self.active:
            self.facts.raise_if_over()
            self.membership.position = round + 1

    def begin_at(self, round: int) -> None:
        """Rounds below `round` are over: a generation without this node's peers begins no earlier one."""
        self.membership.position = round

    def caught_up(self) -> None:
        """This node has a model."""
        self.membership.fresh = False

    def installed(self, generation: Generation, now: float) -> None:
        """What belonged to the old generation has been put away for this one."""
        self._obey(self.membership.installed(generation, now))

    def begun(self, generation: Generation) -> None:
        """This generation is in force here."""
        self.facts.regrouping = ""
        self._report("generation", f"{generation.number} of nodes {', '.join(map(str, generation.members))}")


class GenerationWait:
    """The wait of one node for its next generation: call `step` until it returns one, at least every POLL_SECONDS."""

    def __init__(
        self, reconfiguration: Reconfiguration, alone_seconds: float, together_seconds: float,
        install: Callable[[Generation], None], now: float,
    ) -> None:
        """install(generation): puts away what belonged to the old one, for this one; it blocks nobody."""
        self._reconfiguration, self._install = reconfiguration, install
        self._alone_seconds, self._together_seconds = alone_seconds, together_seconds
        self._began = self._alone_since = now

    def step(self, now: float) -> Generation | None:
        """The generation that is in force now; None while there is none.

        Raises PeerLost, naming nobody in `missing`, when none can be had: after alone_seconds without enough others, or
        together_seconds in all. Raises Interrupted when the run is to stop and this node is outside, or hears nobody
        who would close with it for STOPPING_TIMEOUT_SECONDS; AssemblyError when it is refused.
        """
        of, membership = self._reconfiguration, self._reconfiguration.membership
        of.facts.raise_if_failed()
        if of.to_install is not None:
            generation, of.to_install = of.to_install, None
            self._install(generation)
            of.installed(generation, now)
        going, of.going = of.going, None
        if going is not None and membership.steady:
            of.begun(going)
            return going
        if membership.stage not in ("short", "outside", "suspecting"):
            self._alone_since = now
        self._raise_if_in_vain(now)
        return None

    def _raise_if_in_vain(self, now: float) -> None:
        membership, counters = self._reconfiguration.membership, self._reconfiguration.counters
        reason, outside = membership.reason, membership.stage == "outside"
        if outside and not membership.joining.answered:
            reason += "; no other node of the run answers"
        alone, together = now - self._alone_since, now - self._began
        if membership.stopping and alone > (POLL_SECONDS if outside else STOPPING_TIMEOUT_SECONDS):
            raise Interrupted(f"node {membership.uid}: stopped while {reason}")
        if alone > self._alone_seconds or together > self._together_seconds:
            raise PeerLost(
                f"node {membership.uid}: no new generation of members within {together:.0f} s; {reason}"
                f"{counters.refused_handshakes()}"
            )
