"""Generations of a networked transport: membership on the I/O thread, what follows from it on the training thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.run_state import STOPPING_TIMEOUT_SECONDS, RunState
from decentnode.errors import AssemblyError, Interrupted, PeerLost, Regrouping
from decentnode.wire.generation import Broken, Generation, GenerationEvent, Install, JoinRefused, Outside
from decentnode.wire.membership import Membership
from decentnode.wire.messages import Message

if TYPE_CHECKING:
    from decentnode.communication.zeromq.link_driver import LinkDriver

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25


class Reconfiguration:
    """One node's part in agreeing on generations. All state is guarded by `links.lock`.

    `RunState.regrouping` is set from the moment a generation ends until the next one is in force: every wait of the
    training thread ends then, and no round begins.
    """

    def __init__(self, membership: Membership, links: LinkDriver, status: RunState, counters: Counters) -> None:
        self.membership = membership
        self.active = False
        """Whether the run has begun; before it, a missing node is the start's business."""
        self.stop_asked = False
        """Any thread: the run is to stop; this node waits for nobody to come back any more."""
        self._links, self._status, self._counters = links, status, counters
        self._install: Generation | None = None
        self._going: Generation | None = None

    @property
    def generation(self) -> Generation:
        """The one in force, or the last that was."""
        return self.membership.generation

    # -- I/O thread -------------------------------------------------------------------------------------------

    def begin(self, run: bytes) -> None:
        """Generation 0 is in force: everybody has joined."""
        with self._links.lock:
            self.membership.run, self.active = run, True

    def receive(self, message: Message, now: float) -> None:
        """With `links.lock` held. Raises PeerFault."""
        if self.active:
            self._note_stop()
            try:
                self._obey(self.membership.receive(message, now))
            finally:
                self._obey([])  # an answer may belong to what is refused

    def tick(self, now: float) -> None:
        """With `links.lock` held."""
        if self.active:
            self._note_stop()
            waiting = self._status.waiting
            whom, since = waiting if waiting is not None else ((), now)
            self._obey(self.membership.tick(now, whom, now - since))

    def _note_stop(self) -> None:
        self.membership.stopping = self.membership.stopping or self.stop_asked or self._status.stopping

    def _obey(self, events: list[GenerationEvent]) -> None:
        for event in events:
            if isinstance(event, Broken):
                logger.warning("generation %d is over: %s", self.generation.number, event.reason)
                self._tell("generation_over", event.reason)
                with self._status.changed:
                    self._status.regrouping = event.reason
                    self._status.notify()
            elif isinstance(event, Outside):
                logger.warning("outside: %s", event.reason)
                self._tell("outside", event.reason)
                self._install = None
            elif isinstance(event, JoinRefused):
                self._tell("refused", event.reason)
                self._fail_with(event.reason)
            else:
                with self._status.changed:
                    if isinstance(event, Install):
                        self._install, self._going = event.generation, None
                    else:
                        self._going = event.generation
                    self._status.notify()
        outbox, self.membership.outbox = self.membership.outbox, []
        for uid, message in outbox:
            self._links.links.sender.send_once(uid, message)

    def _fail_with(self, reason: str) -> None:
        uid = self.membership.uid
        with self._status.changed:
            self._status.failure = self._status.failure or AssemblyError(f"node {uid} was {reason}", [uid])
            self._status.notify()

    def _tell(self, kind: str, detail: str) -> None:
        self._counters.on_event(kind, None, detail)

    # -- any thread -------------------------------------------------------------------------------------------

    def suspect(self, uids: Collection[int], reason: str, dead: bool = False) -> None:
        """These do not answer, or (dead) have ended: once this returns, no round of the generation begins here."""
        with self._links.lock:
            if self.active:
                self._obey(self.membership.suspect(uids, clock.now(), reason, dead))

    def fail(self) -> None:
        """This node failed: tell everybody, so that nobody has to find out."""
        with self._links.lock:
            if self.active:
                self.membership.fail()
                self._obey([])

    # -- training thread --------------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """Come from outside: this process joins a run that has begun."""
        with self._links.lock:
            self.active = True
            self._status.regrouping = reason
            self._obey(self.membership.leave(clock.now(), reason))

    def enter(self, round: int) -> None:
        """A round begins. Raises Regrouping when it may not."""
        with self._links.lock:
            if self.active:
                self._status.raise_if_over()
                self.membership.position = round + 1

    def caught_up(self) -> None:
        """This node has a model."""
        with self._links.lock:
            self.membership.fresh = False

    def wait(self, alone_seconds: float, together_seconds: float, install: Callable[[Generation], None]) -> Generation:
        """Blocking: put the old generation away and return when the next one is in force.

        install(generation), with `links.lock` held, puts away what belonged to the old one. Raises PeerLost, naming
        nobody in `missing`, when none can be had: after alone_seconds without enough others, or together_seconds in
        all. Raises Interrupted when the run is to stop and this node is outside, or hears nobody who would close with
        it for STOPPING_TIMEOUT_SECONDS; AssemblyError when it is refused.
        """
        began = alone_since = clock.now()
        while True:
            self._status.raise_if_failed()
            with self._links.lock:
                now = clock.now()
                if self._install is not None:
                    generation, self._install = self._install, None
                    install(generation)
                    self._obey(self.membership.installed(generation, now))
                going, self._going = self._going, None
                if going is not None and self.membership.steady:
                    self._status.regrouping = ""
                    self._tell("generation", f"{going.number} of nodes {', '.join(map(str, going.members))}")
                    return going
                if self.membership.stage not in ("short", "outside", "suspecting"):
                    alone_since = now
                reason, outside = self.membership.reason, self.membership.stage == "outside"
                stopping = self.membership.stopping
                if outside and not self.membership.joining.answered:
                    reason += "; no other node of the run answers"
            if stopping and now - alone_since > (POLL_SECONDS if outside else STOPPING_TIMEOUT_SECONDS):
                raise Interrupted(f"node {self.membership.uid}: stopped while {reason}")
            if now - alone_since > alone_seconds or now - began > together_seconds:
                raise PeerLost(
                    f"node {self.membership.uid}: no new generation of members within {now - began:.0f} s; {reason}"
                    f"{self._counters.refused_handshakes()}"
                )
            with self._status.changed:
                if self._install is None and self._going is None:
                    self._status.changed.wait(POLL_SECONDS)


def given_up(error: Exception, status: RunState, seconds: float) -> bool:
    """Blocking for `seconds` at most: whether a failure of the training thread is but the end of the generation."""
    deadline = clock.now() + seconds
    with status.changed:
        while not status.regrouping and status.failure is None and (left := deadline - clock.now()) > 0:
            status.changed.wait(min(left, POLL_SECONDS))
        return isinstance(error, Regrouping) or bool(status.regrouping)
