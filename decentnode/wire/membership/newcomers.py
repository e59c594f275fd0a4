"""Who asks to be a member though it is in no mapping: the leader grants it a uid, all others say whom to ask."""

from __future__ import annotations

from collections.abc import Callable

from decentnode.wire.bounds import fitting
from decentnode.wire.generation import Caller
from decentnode.wire.invitation import Invitation
from decentnode.wire.membership.seats import Seat, check, seen_from
from decentnode.wire.membership.state import MemberState
from decentnode.wire.messages import PROTOCOL_VERSION, Knock, Resign, Turned


class Newcomers:
    """One node's answers to them."""

    def __init__(self, state: MemberState, draw: Callable[[int], bytes]) -> None:
        """draw: as of `MemberState`, for the tokens of their uids."""
        self._state, self._draw = state, draw

    def knock(
        self, knock: Knock, caller: Caller, now: float, invitation: Invitation | None = None
    ) -> tuple[Seat, int] | Turned:
        """Grant a newcomer a uid: (its seat, the uid). Else why not, and whom to ask; the owner adds where that one
        listens. invitation: what it showed, where the run wants one. Raises PeerFault for a malformed request.

        Call `Membership.take_events` after it.
        """
        state = self._state
        check(knock.control, knock.bulk, caller.key)
        via = seen_from(knock.control, caller.address, knock.reach)
        by = "" if invitation is None else invitation.id.hex()
        asked = Seat(b"", knock.control, knock.bulk, caller.key, via, by)
        leader = min(state.counted_on() | {state.uid})
        if knock.version != PROTOCOL_VERSION:
            return self._turned(f"it speaks protocol {knock.version}, the run speaks {PROTOCOL_VERSION}", final=True)
        if closed := self.closed():
            return closed
        if not state.steady or state.guest:
            return self._turned("the members are agreeing on a generation")
        if leader != state.uid:
            return self._turned(f"{state.describe(leader)} admits newcomers", ask=leader)
        if invitation is not None and state.seats.used_up(asked, invitation.uses):
            return self._turned(f"its invitation is for {invitation.uses} nodes, and that many have joined", final=True)
        taken = {*state.generation.members, *state.joiners}
        uid = state.seats.grant(asked, taken, now, self._draw)
        if uid is None:
            return self._turned(f"all {state.seats.stop - state.seats.first} uids beyond the mapping are taken "
                                "(node.newcomers)")  # fmt: skip
        state.seated(uid)
        return state.seats.known[uid], uid

    def closed(self) -> Turned | None:
        """Why nobody who is not in the mapping can come any more, or at all; None where somebody may."""
        state = self._state
        if state.seats.stop == state.seats.first:
            return self._turned("the run admits no nodes beyond its mapping (node.newcomers)", final=True)
        return self._turned("the run is over", final=True) if state.over() else None

    def resigned(self, resign: Resign) -> Turned:
        """A newcomer does not come: its uid is free at once, unless it has begun to join. Else whom it should tell."""
        state = self._state
        leader, uid = min(state.counted_on() | {state.uid}), resign.uid
        if leader != state.uid:
            return self._turned(f"{state.describe(leader)} admits newcomers", ask=leader)
        if uid not in {*state.generation.members, *state.joiners} and uid in state.seats.known \
                and state.seats.admits(uid, resign.seat):  # fmt: skip
            state.seats.release(uid)
        return self._turned("its place is free", final=True)

    def _turned(self, reason: str, final: bool = False, ask: int | None = None) -> Turned:
        state = self._state
        return Turned(state.run, 0, state.uid, fitting(reason), int(final), state.uid if ask is None else ask, "")
