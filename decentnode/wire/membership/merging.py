"""How generations on different sides of a partition merge (`Limits.merges`): the largest one's leader proposes it."""

from __future__ import annotations

from decentnode.wire.generation import Name
from decentnode.wire.membership.leader import Leader
from decentnode.wire.membership.state import MemberState
from decentnode.wire.membership.succession import Succession
from decentnode.wire.messages import Current, Ping


class Merging:
    """One node's part in merging generations. `Sides` has what it knows of the other generations."""

    def __init__(self, state: MemberState, leader: Leader, succession: Succession) -> None:
        self._state, self._leader, self._succession = state, leader, succession

    def heard(self, current: Current, name: Name, members: set[int], now: float) -> None:
        """Notes that a node is in another generation `name` with these members; with `Limits.merges` no node is
        excluded for that.

        The message answers one about this node's generation, so it was sent after that began. A member of this node's
        generation that has entered a higher one has left this one.
        """
        state = self._state
        if current.source in state.generation.members:
            if name > state.generation.name:
                reason = f"{state.describe(current.source)} is in another generation"
                self._succession.suspect({current.source}, now, reason)
        elif state.steady and current.steady:
            state.sides.heard(name, frozenset(members), current.source, now)
            self._merge_if_possible(now)

    def _merge_if_possible(self, now: float) -> None:
        """If this node leads, proposes a common generation with the smaller sides whose members have all answered."""
        state = self._state
        present = state.present_members() | {state.uid}
        if state.uid != min(present) or state.stopping:
            return
        sides = dict(state.sides.mergeable(state.generation.members, present))
        if sides:
            back = state.names(set().union(*sides.values()))
            state.end_generation(f"{back} continued separately and can be reached again")
            self._leader.propose_merge(sides, now)

    def ping_others(self, now: float) -> None:
        """If this node leads, pings the nodes that are not in its generation when that is due."""
        state = self._state
        if not state.limits.merges or state.stage != "steady" or now < state.sides.due:
            return
        state.sides.note_pinged(now)
        if state.uid == min(state.present_members() | {state.uid}):
            for uid in state.others():
                if uid not in state.generation.members:
                    state.say(uid, Ping)
