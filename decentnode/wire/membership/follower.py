"""A follower's part in agreeing on a generation: promise, get ready, enter."""

from __future__ import annotations

from decentnode.errors import PeerFault
from decentnode.wire.codec import from_bitmap
from decentnode.wire.generation import Generation, Install
from decentnode.wire.membership.sides import decode_names
from decentnode.wire.membership.state import MemberState, name_of
from decentnode.wire.messages import Commit, Go, Message, Prepare, Ready


class Follower:
    """The follower's actions in the stages "promised" and "committed"."""

    def __init__(self, state: MemberState) -> None:
        self._state = state

    @property
    def active(self) -> bool:
        """Whether this node follows a leader at the moment."""
        return self._state.stage in ("promised", "committed")

    def on_prepare(self, prepare: Prepare, now: float) -> None:
        """Promises the proposed generation, or answers with the promise of a higher name. Raises PeerFault if the
        sender may not propose this name."""
        state = self._state
        name, members = name_of(prepare), from_bitmap(prepare.members, state.num_nodes)
        if state.uid not in members:
            return
        if prepare.source not in members or not state.may_propose(prepare.source, name):
            raise PeerFault("wrong_sender", f"generation {prepare.generation} prepared by {prepare.source}")
        is_foreign = prepare.source not in state.generation.members and not state.is_guest
        if state.limits.merges and is_foreign and state.generation.name not in decode_names(prepare.merges):
            state.send_current(prepare)  # a delayed copy of an attempt on another side of a partition
            return
        if is_foreign and state.steady and not state.limits.merges:  # the others continued without the sender
            state.send_current(prepare)
            return
        if name < state.promised or name[0] <= state.generation.number:
            state.send_promise(prepare.source)
            return
        state.learn_seats(prepare.seats)
        if state.stage == "steady":
            state.end_generation(f"{state.describe(prepare.source)} prepares generation {prepare.generation}")
        if name > state.promised or not self.active:
            state.run = prepare.run
            state.promised, state.coordinator = name, prepare.source
            state.change("Prepare")
            state.suspects -= members
            state.drop_attempt()
            state.yields_until = 0.0
        state.coordinator_heard = now
        self.repeat()

    def on_commit(self, commit: Commit, now: float) -> None:
        """Makes the owner release the resources of the old generation (`Install`)."""
        state = self._state
        if not self._from_coordinator(commit):
            return
        state.coordinator_heard = now
        if state.stage == "promised":
            members = tuple(sorted(from_bitmap(commit.members, state.num_nodes)))
            fresh = frozenset(from_bitmap(commit.fresh, state.num_nodes))
            state.pending = Generation(
                commit.generation, members, commit.first_round, fresh, commit.origin, bool(commit.stopping),
                bool(commit.merging),
            )  # fmt: skip
            state.change("Commit")
            state.events.append(Install(state.pending))
        self.repeat()

    def on_go(self, go: Go) -> bool:
        """Returns whether this node now enters the generation that it is ready for."""
        state = self._state
        return self._from_coordinator(go) and state.stage == "committed" and state.pending_ready

    def repeat(self) -> None:
        """Sends again the answer that the coordinator waits for."""
        state = self._state
        if state.stage == "committed" and state.pending_ready:
            state.say(state.coordinator, Ready, state.promised)
        elif self.active:
            state.send_promise(state.coordinator)

    def _from_coordinator(self, message: Message) -> bool:
        """Returns whether a message comes from the coordinator and names the generation that this node promised it."""
        state = self._state
        return self.active and name_of(message) == state.promised and message.source == state.coordinator
