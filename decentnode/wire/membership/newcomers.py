"""Requests of nodes outside the mapping: the leader grants them uids, all other members say which node to ask."""

from __future__ import annotations

from collections.abc import Callable

from decentnode.wire.bounds import fitting
from decentnode.wire.generation import Caller
from decentnode.wire.invitation import Invitation
from decentnode.wire.membership.seats import Seat, check_seat, relay_address
from decentnode.wire.membership.state import MemberState
from decentnode.wire.messages import PROTOCOL_VERSION, Declined, Knock, Resign


class Newcomers:
    """One node's answers to newcomers, nodes outside the mapping that ask to be members."""

    def __init__(self, state: MemberState, draw: Callable[[int], bytes]) -> None:
        """draw: as for `MemberState`; it draws the tokens of the uids."""
        self._state, self._draw = state, draw

    def knock(
        self, knock: Knock, caller: Caller, now: float, invitation: Invitation | None = None
    ) -> tuple[Seat, int] | Declined:
        """Grants a newcomer a uid and returns (its seat, the uid), or returns why not and which node to ask.

        The owner adds the address of that node. invitation: the one that the newcomer sent, if the run requires one.
        Raises PeerFault for a malformed request. The caller then calls `Membership.take_events`.
        """
        state = self._state
        check_seat(knock.control, knock.bulk, caller.key)
        via = relay_address(knock.control, caller.address, knock.reach)
        by = "" if invitation is None else invitation.id.hex()
        asked = Seat(b"", knock.control, knock.bulk, caller.key, via, by)
        leader = min(state.present_members() | {state.uid})
        if knock.version != PROTOCOL_VERSION:
            return self._decline(f"it speaks protocol {knock.version}, the run speaks {PROTOCOL_VERSION}", final=True)
        if closed := self.why_closed():
            return closed
        if not state.steady or state.is_guest:
            return self._decline("the members are agreeing on a generation")
        if leader != state.uid:
            return self._decline(f"{state.describe(leader)} admits newcomers", ask=leader)
        if invitation is not None and state.seats.used_up(asked, invitation.uses):
            reason = f"its invitation is for {invitation.uses} nodes, and that many have joined"
            return self._decline(reason, final=True)
        taken = {*state.generation.members, *state.joiners}
        uid = state.seats.grant(asked, taken, now, self._draw)
        if uid is None:
            return self._decline(f"all {state.seats.stop - state.seats.first} uids beyond the mapping are taken "
                                "(node.newcomers)")  # fmt: skip
        state.seated(uid)
        return state.seats.known[uid], uid

    def why_closed(self) -> Declined | None:
        """Returns why no newcomer is admitted any more or at all, or None if newcomers are admitted."""
        state = self._state
        if state.seats.stop == state.seats.first:
            return self._decline("the run admits no nodes beyond its mapping (node.newcomers)", final=True)
        return self._decline("the run is over", final=True) if state.is_finished() else None

    def handle_resign(self, resign: Resign) -> Declined:
        """Frees the uid of a newcomer that does not join, unless it has begun to join. If another node leads, the
        answer names that node instead."""
        state = self._state
        leader, uid = min(state.present_members() | {state.uid}), resign.uid
        if leader != state.uid:
            return self._decline(f"{state.describe(leader)} admits newcomers", ask=leader)
        if uid not in {*state.generation.members, *state.joiners} and uid in state.seats.known \
                and state.seats.admits(uid, resign.seat):  # fmt: skip
            state.seats.release(uid)
        return self._decline("its place is free", final=True)

    def _decline(self, reason: str, final: bool = False, ask: int | None = None) -> Declined:
        state = self._state
        return Declined(state.run, 0, state.uid, fitting(reason), int(final), state.uid if ask is None else ask, "")
