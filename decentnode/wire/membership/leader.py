"""The leader's part in agreeing on a generation: propose, collect promises, commit, collect `Ready` messages."""

from __future__ import annotations

from collections.abc import Mapping

from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import Install, Name, proposer_of
from decentnode.wire.membership.proposal import Proposal
from decentnode.wire.membership.sides import encode_names
from decentnode.wire.membership.state import MemberState, name_of
from decentnode.wire.messages import Commit, Go, Prepare, Promise, Ready


class Leader:
    """The leader's actions in the stages "preparing" and "committing", and "short" if too few nodes are left.

    If the node then has to enter the generation or to find a new leader, a method returns True, and its caller does so.
    """

    def __init__(self, state: MemberState) -> None:
        self._state = state

    def propose(self, now: float) -> None:
        """Begins an attempt with all members that are not absent and, unless the run stops, all that asked to join."""
        state = self._state
        joiners = set() if state.stopping else state.joiners
        members = frozenset(state.present_members() | joiners | {state.uid})
        if not state.limits.are_sufficient(state.in_mapping(members | state.left)) and not state.stopping:
            self._fall_short()
            return
        number = max(state.generation.number, state.promised[0], state.highest_seen[0]) + 1
        self.prepare(state.new_name(number), members, now)

    def propose_merge(self, sides: Mapping[Name, frozenset[int]], now: float) -> None:
        """Begins an attempt to merge this node's generation with those of other sides of a partition.

        sides: name of each generation -> its members.
        """
        state = self._state
        members = frozenset(state.present_members() | {state.uid}).union(*sides.values())
        number = max(state.generation.number, state.promised[0], state.highest_seen[0]) + 1
        self.prepare(state.new_name(number), members, now, frozenset({state.generation.name, *sides}))

    def prepare(
        self, name: Name, members: frozenset[int], now: float, merges: frozenset[Name] = frozenset()
    ) -> None:
        """Begins an attempt with these members, under a name that is higher than any that this node has promised."""
        state = self._state
        state.promised, state.coordinator = name, state.uid
        state.change("proposes")
        state.proposal = Proposal(name, members, dict.fromkeys(members - {state.uid}, now), merges=merges)
        state.proposal.promises[state.uid] = state.promise()
        self._check_promises(now)
        self._send_stage()

    def tick(self, now: float) -> bool:
        """Sends the stage's message again, or returns True if a new leader has to be found instead, because a member is
        silent or left, or another node proposed as high a number."""
        state, proposal = self._state, self._state.proposal
        assert proposal is not None
        silent = proposal.silent(now, state.limits, state.stage == "committing", state.watch.patience)
        silent -= state.left | {state.uid}
        outbid = state.highest_seen[0] >= proposal.name[0]
        if outbid and proposer_of(state.highest_seen[1]) < state.uid:
            # Two nodes lead without hearing each other. If each proposed a higher number than the other at once,
            # neither would ever succeed; the node with the higher uid therefore waits.
            state.change("yields")
            state.drop_attempt()
            state.yields_until = now + state.limits.suspect_seconds
            return False
        if silent or outbid or proposal.members & state.left:
            state.suspects |= silent
            state.joiners -= silent
            return True
        self._send_stage()
        return False

    def on_promise(self, promise: Promise, now: float) -> None:
        state, proposal = self._state, self._state.proposal
        if proposal is None or name_of(promise) != proposal.name:  # it promised another proposal
            state.highest_seen = max(state.highest_seen, name_of(promise))
        if proposal is None or promise.source not in proposal.members:
            return
        proposal.heard_at[promise.source] = now
        if state.stage == "preparing" and name_of(promise) == proposal.name:
            proposal.promises[promise.source] = promise
            self._check_promises(now)

    def on_ready(self, ready: Ready, now: float) -> bool:
        """Returns whether all members are ready now and were sent `Go`, so that this node enters the generation too."""
        state, proposal = self._state, self._state.proposal
        if proposal is not None and name_of(ready) == proposal.name and ready.source in proposal.members:
            proposal.heard_at[ready.source] = now
            return state.stage == "committing" and self._add_ready(ready.source)
        if state.stage == "steady" and name_of(ready) == state.generation.name:
            state.say(ready.source, Go)  # the first Go was lost
        return False

    def own_ready(self) -> bool:
        """Notes that this node is ready. Returns whether all members are now and were sent `Go`."""
        return self._add_ready(self._state.uid)

    def _add_ready(self, uid: int) -> bool:
        state, proposal = self._state, self._state.proposal
        assert proposal is not None
        proposal.ready.add(uid)
        if proposal.ready != proposal.members:
            return False
        for other in sorted(proposal.members - {state.uid}):
            state.say(other, Go, proposal.name)
        return True

    def _check_promises(self, now: float) -> None:
        """Commits once all have promised, if a generation can follow from their promises."""
        state, proposal = self._state, self._state.proposal
        if proposal is None or state.stage != "preparing" or not proposal.promised_by_all():
            return
        generation = proposal.resulting_generation(state.limits.needed)
        if generation is None:
            state.go_outside(now, "no remaining node has a model")
            return
        if not state.enough(generation):
            self._fall_short()
            return
        state.pending, state.pending_ready, proposal.committed_at = generation, False, now
        state.change("all promised")
        self._send_stage()
        state.events.append(Install(generation))

    def _fall_short(self) -> None:
        state = self._state
        absent = (state.suspects | state.failed) - state.joiners
        state.change("too few")
        state.proposal = None
        needs = f"a generation needs {state.limits.min_nodes} of {state.founders} {state.limits.setting}"
        if servers := absent & state.limits.needed:
            needs = f"no round can begin without the server {state.names(servers)}"
        silent = state.no_answer_reason(absent) if absent else "a node that left does not answer"
        state.reason = f"{silent}, and {needs}"

    def _send_stage(self) -> None:
        """Sends the stage's message to all other members of the proposal."""
        state, proposal = self._state, self._state.proposal
        if proposal is None:
            return
        members, pending = to_bitmap(proposal.members, state.num_nodes), state.pending
        for uid in sorted(proposal.members - {state.uid}):
            if state.stage == "preparing":
                state.say(uid, Prepare, proposal.name, members, state.seats.encoded(), encode_names(proposal.merges))
            elif pending is not None:
                fresh = to_bitmap(pending.fresh, state.num_nodes)
                state.say(uid, Commit, proposal.name, members, fresh, pending.first_round, int(pending.stopping),
                          int(pending.merging))  # fmt: skip
