"""Which node leads to the next generation, and when: a member is missed, the leader is silent, or a node asks to
join."""

from __future__ import annotations

from decentnode.wire.codec import to_bitmap
from decentnode.wire.membership.follower import Follower
from decentnode.wire.membership.leader import Leader
from decentnode.wire.membership.state import MemberState
from decentnode.wire.messages import Suspect


class Succession:
    """Ends a generation of which a member is missed; this node then leads to the next one or reports to the leader."""

    def __init__(self, state: MemberState, leader: Leader, follower: Follower) -> None:
        self._state, self._leader, self._follower = state, leader, follower

    def suspect(self, uids: set[int], now: float, reason: str = "", dead: bool = False) -> None:
        """Counts these nodes as absent, which ends the generation in force or an attempt that includes them.

        reason: why the generation ends; by default that they do not answer. dead: their processes are known to have
        ended.
        """
        state = self._state
        if state.stage == "outside":
            return
        if dead:
            state.failed |= uids - {state.uid}
            state.joiners -= uids
            state.left -= uids  # the goodbye arrived before the failure was known
        known = set(state.generation.members) if state.proposal is None else state.proposal.members
        new = uids & known - state.suspects - state.left - {state.uid}
        if not new:
            return
        state.suspects |= new
        if state.stage == "steady":
            state.end_generation(reason or state.no_answer_reason(new))
        following = self._follower.active and state.coordinator not in new
        if not following:
            self.find_leader(now)

    def find_leader(self, now: float) -> None:
        """Finds a new leader: the lowest uid that is not absent, which may be this node."""
        state = self._state
        if state.is_guest:
            state.go_outside(now, f"{state.describe(state.coordinator)} did not admit this node")
            return
        state.change("new leader")
        state.drop_attempt()
        state.yields_until = 0.0
        first = min(state.present_members() | {state.uid})
        if first == state.uid:
            self._leader.propose(now)
        else:
            state.coordinator, state.coordinator_heard = first, now
            self.report_missed(now)

    def report_missed(self, now: float) -> None:
        """Tells the leader which nodes are missed. If the leader is silent itself, the next lowest uid leads."""
        state = self._state
        if now - state.coordinator_heard > state.watch.patience:
            state.suspects.add(state.coordinator)
            self.find_leader(now)
        else:
            missed = (state.suspects | state.failed) - {state.uid}
            state.say(state.coordinator, Suspect, None, to_bitmap(missed, state.num_nodes), int(state.stopping))

    def admit(self, now: float) -> None:
        """Begins an attempt with the nodes that asked to join, if this node leads and there is no attempt yet."""
        state = self._state
        if state.stage == "steady" and state.joiners and state.uid == min(state.present_members() | {state.uid}):
            state.end_generation(f"{state.names(state.joiners)} asked to join")
            self._leader.propose(now)
