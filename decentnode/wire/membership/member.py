"""`Membership`: one node's side of agreeing on generations. Messages and ticks in, messages and events out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from decentnode.errors import PeerFault
from decentnode.wire.bounds import fitting
from decentnode.wire.codec import from_bitmap, to_bitmap
from decentnode.wire.generation import Generation, GenerationEvent, Going, JoinRefused, Limits
from decentnode.wire.membership.follower import Follower
from decentnode.wire.membership.leader import Leader
from decentnode.wire.membership.merging import Merging
from decentnode.wire.membership.newcomers import Newcomers
from decentnode.wire.membership.stages import HEARD_BY_GUESTS, Cause
from decentnode.wire.membership.state import MemberState, name_of
from decentnode.wire.membership.succession import Succession
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
)

MAX_LEAP = 1 << 20
"""How far the generation number of a message may be above those known here. Without a bound, one wrong message could
use up all numbers."""


REPEAT_SECONDS = 0.25
"""Time after which an unanswered message is sent again."""


class Membership(MemberState):
    """One node's side of agreeing on generations.

    The owner calls `receive` for every message and `tick` at `next_deadline` at the latest, sends the messages in
    `outbox`, and acts on the events that every call returns. Not thread-safe; never blocks. `now` is the time of any
    monotonic clock, in seconds.
    """

    def __init__(
        self, uid: int, num_nodes: int, limits: Limits, *, draw: Callable[[int], bytes], digest: str = "",
        run: bytes = NO_RUN, describe: Callable[[int], str] = lambda uid: f"node {uid}",
        founders: int | None = None, seat: bytes = b"",
    ) -> None:
        super().__init__(uid, num_nodes, limits, draw=draw, digest=digest, run=run, describe=describe,
                         founders=founders, seat=seat)  # fmt: skip
        self._leader, self._follower = Leader(self), Follower(self)
        self._succession = Succession(self, self._leader, self._follower)
        self._merging = Merging(self, self._leader, self._succession)
        self.newcomers = Newcomers(self, draw)
        self._repeat_at = math.inf
        """When unanswered messages are sent again; infinite while this node waits for no answer."""
        self._handlers: dict[type[Message], Callable[[Any, float], None]] = {
            Bye: self._on_bye, Commit: self._follower.on_commit, Current: self._on_current, Denied: self._on_denied,
            Go: self._on_go, Join: self._on_join, Ping: self._on_ping, Pong: self._on_pong,
            Prepare: self._follower.on_prepare, Promise: self._leader.on_promise, Ready: self._on_ready,
            Suspect: self._on_suspect,
        }  # fmt: skip

    # -- calls of the owner -----------------------------------------------------------------------------------

    def suspect(self, uids: Collection[int], now: float, reason: str = "", dead: bool = False) -> list[GenerationEvent]:
        """Reports nodes that do not answer though the training waits for them or, with `dead`, whose processes
        ended."""
        self.left -= set(uids)
        self.departed -= set(uids)
        self._succession.suspect(set(uids), now, reason, dead)
        return self._take_events(now)

    def leave(self, now: float, reason: str) -> list[GenerationEvent]:
        """Puts this node outside: its process was restarted, or the others continued without it."""
        self.go_outside(now, reason)
        return self._take_events(now)

    def renew(self, now: float, reason: str) -> list[GenerationEvent]:
        """Asks for another generation though no member is missed, because this node cannot continue in this one."""
        if self.stage == "steady":
            self.end_generation(reason)
            self._succession.find_leader(now)
        return self._take_events(now)

    def stop(self, now: float) -> list[GenerationEvent]:
        """Notes that the run is to stop. If too few members are left for a round, any number is enough to close."""
        self.stopping = True
        if self.stage == "short":
            self._succession.find_leader(now)
        return self._take_events(now)

    def refusal_to_leave(self, others: Collection[int] = ()) -> str:
        """Returns why no generation is possible without this node and `others`, or "" if one is. It is always "" if
        this node is a newcomer or begins no further round."""
        members = set(self.message_generation.members)
        rest = self.in_mapping(members - {self.uid, *others})
        if self.uid >= self.founders or self.is_finished() or self.limits.are_sufficient(rest):
            return ""
        if servers := set(self.limits.needed - rest):
            return f"no round can begin without the server {self.names(servers)}"
        return (f"{len(rest)} of {self.founders} would be left, and a generation needs "
                f"{self.limits.min_nodes} {self.limits.setting}")  # fmt: skip

    def fail(self) -> None:
        """Tells every member that this process ends, so that none has to wait until its silence is noticed."""
        generation = self.message_generation
        for uid in generation.members:
            if uid != self.uid:
                self.say(uid, Suspect, generation.name, to_bitmap([self.uid], self.num_nodes), int(self.stopping))

    def installed(self, generation: Generation, now: float) -> list[GenerationEvent]:
        """Notes that the owner has released the resources of the previous generation, as `Install` asked."""
        if self.pending is None or self.pending.name != generation.name:
            return self._take_events(now)
        self.pending_ready = True
        if self.stage == "committing":
            if self._leader.own_ready():
                self._enter("all ready", now)
        elif self.stage == "committed":
            self._follower.repeat()
        return self._take_events(now)

    def next_deadline(self, waiting_since: float | None = None) -> float:
        """Returns the latest time at which `tick` has to be called; infinite if nothing is due.

        waiting_since: when the training began to wait for other nodes; None while it does not wait.
        """
        if self.stage != "steady" or waiting_since is None:
            return min(self._repeat_at, self.sides.due)
        return min(self._repeat_at, self.sides.due, self.watch.next_ask(waiting_since))

    def tick(
        self, now: float, waiting_for: Iterable[int] = (), waiting_since: float = math.inf
    ) -> list[GenerationEvent]:
        """Sends unanswered messages again and notes which nodes are silent. To be called at `next_deadline` at the
        latest.

        waiting_for: the nodes that the training waits for. waiting_since: when it began to wait.
        """
        self._merging.ping_others(now)
        due = min(self._repeat_at, self.watch.next_ask(waiting_since) if self.stage == "steady" else math.inf)
        if now < due:
            return self._take_events(now)
        late = now - min(self._repeat_at, self.watch.repeats_at(waiting_since) if self.stage == "steady" else math.inf)
        self.watch.note_delay(late)
        if late > self.watch.patience / 2:
            self._ignore_silence(now)  # this process was not scheduled, so the silence of the others means nothing
        self._repeat_at = math.inf  # `_take_events` sets it anew
        self.other_generations.expire(now)
        if self.other_generations and self.stage != "outside":
            self.ping_all()  # a node is in another generation: find out how many are
        if self.stage == "steady":
            self._check_awaited(waiting_for, waiting_since, now)
        elif self.stage == "suspecting" and self.yields_until:
            if now >= self.yields_until:
                self._succession.find_leader(now)
        elif self.stage == "suspecting":
            self._succession.report_missed(now)
        elif self.stage in ("preparing", "committing"):
            if self._leader.tick(now):
                self._succession.find_leader(now)
        elif self.stage == "outside":
            self._request_join(now)
        elif self.stage == "short":
            if self.stopping:
                self._succession.find_leader(now)  # to close, any number is enough
            else:
                self.ping_all()  # nodes that continued without this one answer with `Current`
        elif now - self.coordinator_heard > self.watch.patience:
            self.suspects.add(self.coordinator)
            self._succession.find_leader(now)
        else:
            self._follower.repeat()
        return self._take_events(now)

    def take_events(self, now: float) -> list[GenerationEvent]:
        """Returns the events that a call of `newcomers` caused."""
        return self._take_events(now)

    # -- messages ---------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[GenerationEvent]:
        """Handles one decoded message and returns the events. Raises PeerFault for a message that its sender may not
        send; the state does not change then."""
        source = message.source
        if source >= self.num_nodes or source == self.uid:
            raise PeerFault("unknown_uid", str(source))
        learns_seats = self.is_guest and type(message) is Prepare
        if source >= self.founders and source not in self.seats.known and not learns_seats:
            raise PeerFault("unknown_uid", f"{source}, which nobody has")
        joining = isinstance(message, Join) or (self.stage == "outside" and self.run == NO_RUN)
        if message.run != self.run and not joining:
            raise PeerFault("wrong_run", f"{type(message).__name__} of run {message.run.hex()}")
        known = max(self.generation.name, self.promised)[0]
        if message.generation > known + MAX_LEAP and not self.fresh:
            raise PeerFault("wrong_generation", f"{message.generation} after {known}")
        if not self.is_guest or type(message) in HEARD_BY_GUESTS:
            self._handlers[type(message)](message, now)
        return self._take_events(now)

    def _on_ping(self, ping: Ping, now: float) -> None:
        if ping.source in self.generation.members:
            self.say(ping.source, Pong)
        else:
            self.send_current(ping)
            self.sides.ping_soon(now)

    def _on_pong(self, pong: Pong, now: float) -> None:
        if self.limits.merges and pong.source not in self.generation.members and self.steady:
            self.send_current(pong)  # it still counts this node as a member of its generation
        if name_of(pong) == self.generation.name:  # a node of another generation is missed in this one
            self.watch.answered(pong.source, now)
        if self.stage == "suspecting" and pong.source == self.coordinator:
            self.coordinator_heard = now
        elif self.stage == "short" and pong.source in self.suspects:
            self.suspects.discard(pong.source)
            self._succession.find_leader(now)

    def _on_bye(self, bye: Bye, now: float) -> None:
        if name_of(bye) not in (self.generation.name, self.promised) or bye.source in self.failed:
            return
        if not self.is_finished() or bye.source not in self.message_generation.members:  # a guest cannot have finished
            self.departed.add(bye.source)
            reason = f"{self.describe(bye.source)} left before the last round"
            self._succession.suspect({bye.source}, now, reason, dead=True)
        elif bye.source not in self.suspects:
            self.left.add(bye.source)
            self.joiners.discard(bye.source)
            if self.stage in ("suspecting", "promised", "committed") and self.coordinator == bye.source:
                self._succession.find_leader(now)

    def _on_join(self, join: Join, now: float) -> None:
        if not self.seats.admits(join.source, join.seat):  # no answer: it would reach the node with this uid
            raise PeerFault("wrong_seat", str(join.source))
        reason = self._refusal(join)
        if reason:
            self.say(join.source, Denied, None, join.digest, fitting(reason))
            raise PeerFault("wrong_config", reason)
        if name_of(join) != self.generation.name:
            self.send_current(join)
            return
        if join.source in self.joiners:
            if self.stage == "short":  # it asked during an attempt without it, for which too few nodes were left
                self._succession.find_leader(now)
            return
        if not self.stopping:  # once a stop was requested, no node is admitted
            self.joiners.add(join.source)
        self.left.discard(join.source)
        self.failed.discard(join.source)
        if join.source in self.generation.members:  # its previous process is dead
            self._succession.suspect({join.source}, now, f"{self.describe(join.source)} was started again")
            self.suspects.add(join.source)  # also if the current attempt does not include it
        if self.stage == "short" and self.joiners:
            self._succession.find_leader(now)
        self._succession.admit(now)

    def _refusal(self, join: Join) -> str:
        """Returns why a node can never be part of this run; empty if it can."""
        who = self.describe(join.source)
        if join.version != PROTOCOL_VERSION:
            return f"{who} asks to join with protocol {join.version}, the run speaks {PROTOCOL_VERSION}"
        if join.num_nodes != self.num_nodes:
            return f"{who} asks to join with {join.num_nodes} nodes in its graph, the run has {self.num_nodes}"
        if join.digest != self.digest:
            return f"{who} asks to join with another config or graph (digest {join.digest}, the run has {self.digest})"
        return ""

    def _on_suspect(self, suspect: Suspect, now: float) -> None:
        if suspect.source not in self.generation.members:
            self.send_current(suspect)
            return
        uids = from_bitmap(suspect.uids, self.num_nodes)
        self.say(suspect.source, Pong)
        self.stopping |= bool(suspect.stopping) and name_of(suspect) == self.generation.name
        failed = suspect.source in uids and name_of(suspect) in (self.generation.name, self.promised)
        if failed:
            self.departed.discard(suspect.source)
            self._succession.suspect({suspect.source}, now, f"{self.describe(suspect.source)} failed", dead=True)
        if self._follower.active:
            return  # the leader notices itself which nodes answer
        if self.proposal is not None and suspect.source not in self.proposal.members:
            return
        if name_of(suspect) == self.generation.name and not failed:
            self._succession.suspect(uids, now, f"{self.no_answer_reason(uids)} {self.describe(suspect.source)}")
            if self.stage == "steady":  # no member is missed here, but the sender has left the generation
                self.end_generation(f"{self.describe(suspect.source)} asks for another generation")
                self._succession.find_leader(now)

    def _on_ready(self, ready: Ready, now: float) -> None:
        if self._leader.on_ready(ready, now):
            self._enter("all ready", now)

    def _on_go(self, go: Go, now: float) -> None:
        if self._follower.on_go(go):
            self._enter("Go", now)

    def _on_current(self, current: Current, now: float) -> None:
        name, members = name_of(current), from_bitmap(current.members, self.num_nodes)
        if current.source not in members:
            raise PeerFault("wrong_sender", f"{current.source} is not of its own generation {current.generation}")
        if self.is_guest:
            ask_again = self.joining.note(current.source, name, now)
            if self.stage == "outside" and ask_again:
                self.send_join(current.source)
            return
        own = self.generation.name
        about = (current.about_generation, current.about_origin)
        if about not in (own, self.promised) or self.uid in members or self._follower.active:
            return
        self.highest_seen = max(self.highest_seen, name)
        if self.limits.merges:
            self._merging.heard(current, name, members, now)
            return
        counts = current.steady and current.source < self.founders
        outvoted = counts and self.other_generations.heard(name, current.source, now, own)
        if outvoted or (self.stage == "short" and name > own):
            self.go_outside(now, f"the others continued without this node, in generation {current.generation}")

    def _on_denied(self, denied: Denied, now: float) -> None:  # noqa: ARG002
        if self.stage == "outside" and denied.digest == self.digest:
            self.events.append(JoinRefused(f"refused by {self.describe(denied.source)}: {denied.reason}"))

    def _enter(self, cause: Cause, now: float) -> None:
        """Enters the pending generation, which is in force from now on."""
        assert self.pending is not None
        generation, members = self.pending, set(self.pending.members)
        if self.limits.merges:  # nodes that failed here may have been admitted again on another side
            self.failed -= members - {*self.generation.members}
        self.generation = generation
        self.drop_attempt()
        self.change(cause)
        self.position = generation.first_round
        self.is_guest = False
        self.stopping |= generation.stopping
        self.joiners.clear()
        self.other_generations.clear()
        self.watch.clear()
        self.suspects.clear()
        self.left -= members
        self.departed -= members
        self.failed -= generation.fresh
        if self.limits.merges and len(members) < self.founders:
            self.sides.begin(now)
        self.events.append(Going(generation))
        dead = self.failed & members
        if dead:  # they failed after they had reported to be ready
            self._succession.suspect(dead, now, f"{self.names(dead)} failed")

    # -- ticks ------------------------------------------------------------------------------------------------

    def _request_join(self, now: float) -> None:
        if self.joining.due(now):
            for uid in self.others():
                self.send_join(uid)

    def _check_awaited(self, waiting_for: Iterable[int], waiting_since: float, now: float) -> None:
        """Pings the nodes that the training waits for, and suspects those that have been silent for too long."""
        watched = set(waiting_for) & set(self.generation.members)
        asked, silent = self.watch.ask(watched, waiting_since, now)
        if silent:
            self.left -= set(silent)
            reason = f"{self.no_answer_reason(set(silent))} for {self.watch.patience:.1f} s"
            self._succession.suspect(set(silent), now, reason)
        for uid in asked:
            self.say(uid, Ping)

    def _ignore_silence(self, now: float) -> None:
        """Ignores all silence before `now`."""
        self.coordinator_heard = now
        self.watch.clear()
        if self.proposal is not None:
            self.proposal.ignore_silence(now)

    def _take_events(self, now: float) -> list[GenerationEvent]:
        """Ends every call of the owner: schedules the next repetition if one is needed, and returns the events."""
        if self.stage == "steady" and not self.other_generations:
            self._repeat_at = math.inf
        elif self._repeat_at == math.inf:
            self._repeat_at = now + REPEAT_SECONDS
        events, self.events = self.events, []
        return events
