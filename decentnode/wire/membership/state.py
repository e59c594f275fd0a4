"""The membership state of one node, which the parts of `Membership` share, with its messages and its stage changes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import (
    FIRST,
    Broken,
    Generation,
    GenerationEvent,
    Limits,
    Name,
    Outside,
    Seated,
    new_origin,
    proposer_of,
)
from decentnode.wire.membership.joining import JoinRequests
from decentnode.wire.membership.proposal import OtherGenerations, Proposal
from decentnode.wire.membership.seats import Seats
from decentnode.wire.membership.sides import Sides, encode_names
from decentnode.wire.membership.stages import Cause, Stage, next_stage
from decentnode.wire.membership.watch import Watch
from decentnode.wire.messages import NO_RUN, PROTOCOL_VERSION, Current, Join, Message, Ping, Promise

MAX_NAMED_NODES = 20
"""Most nodes that a reason names."""


class MemberState:
    """The state of one node, which leader, follower and `Membership` share.

    There are three kinds of absent nodes. `suspects` do not answer; they may be alive, and the set is emptied when
    the next generation comes into force. `failed` nodes reported their own failure, or their
    supervisor did: they count as dead until they join again, whatever was promised meanwhile. Nodes that `left` said
    goodbye when no round was left to begin, after the last one or after a stop; a goodbye before that is a failure.
    """

    def __init__(
        self, uid: int, num_nodes: int, limits: Limits, *, draw: Callable[[int], bytes], digest: str = "",
        run: bytes = NO_RUN, describe: Callable[[int], str] = lambda uid: f"node {uid}",
        founders: int | None = None, seat: bytes = b"",
    ) -> None:
        """num_nodes: number of possible uids. founders: number of nodes that are in the mapping and begin the run;
        None: all. seat: for a node that is not in the mapping, the token with which its uid was granted. draw: returns
        the given number of random bytes (os.urandom), so that the proposals of this node before and after a restart
        differ. digest: digest of configuration and graph, compared with that of nodes that ask to join. describe:
        returns the name of a node for reasons.
        """
        self.uid, self.num_nodes, self.limits = uid, num_nodes, limits
        self.founders = num_nodes if founders is None else founders
        self.seat, self.seats = seat, Seats(self.founders, num_nodes)
        self.run = run
        self._draw = draw
        self.digest, self.describe = digest, describe
        self.generation = Generation(0, tuple(range(self.founders)))
        """The generation in force, or the last that was."""
        self.stage: Stage = "steady"
        self.outbox: list[tuple[int, Message]] = []
        """(receiver, message) pairs to send; the owner empties the list."""
        self.events: list[GenerationEvent] = []
        """Events that the next call returns to the owner."""
        self.suspects: set[int] = set()
        self.failed: set[int] = set()
        self.left: set[int] = set()
        """Nodes that said goodbye after the last round or after a stop."""
        self.departed: set[int] = set()
        """Nodes that said goodbye before the last round without having failed, and have not come back."""
        self.joiners: set[int] = set()
        """Nodes that asked to join since the generation in force began."""
        self.stopping = False
        """Whether the run is to stop. The owner sets it; it is never reset."""
        self.position = 0
        """Number of rounds that this node has finished once its current round is over."""
        self.last_round = limits.rounds
        """Number of rounds of the run, as far as this node knows: fewer than planned once an evaluation has ended the
        run. The owner sets it."""
        self.fresh = False
        """Whether this node has no model yet, because it came from outside."""
        self.is_guest = False
        """Whether this node came from outside and has not entered a generation yet."""
        self.coordinator = uid
        """The node that leads, as far as this one knows."""
        self.promised: Name = FIRST
        """The highest generation name that this node promised to follow, or proposed."""
        self.highest_seen: Name = FIRST
        """The highest generation name in messages of others; a proposal takes a higher number."""
        self.reason = ""
        """Why the generation in force ended, or why none can follow it."""
        self.pending: Generation | None = None
        """The generation that all members have promised and that is not in force yet."""
        self.pending_ready = False
        """Whether this node has released the resources of the generation before `pending`."""
        self.proposal: Proposal | None = None
        """The current attempt, if this node leads it."""
        self.coordinator_heard = 0.0
        """When the last message of the coordinator arrived, or the first was sent to it."""
        self.yields_until = 0.0
        """In stage "suspecting", if not 0: the time until which this node lets another node lead."""
        self.watch = Watch(limits.suspect_seconds)
        self.other_generations = OtherGenerations(self.founders, limits)
        self.joining = JoinRequests(limits.suspect_seconds)
        self.sides = Sides(limits.suspect_seconds)
        """Generations on other sides of a partition; used only with `Limits.merges`."""
        self.lineage: Name = FIRST
        """The last generation with whose members this node shared a common model: it took part in the generation with a
        model that already descended from theirs, was sent by them, or is the mean of all. The owner sets it. If the
        members of the next generation differ in it, their models are averaged first."""

    @property
    def steady(self) -> bool:
        return self.stage == "steady"

    @property
    def message_generation(self) -> Generation:
        """The generation that this node's messages name: the one in force, or the one that it is ready for."""
        return self.pending if self.pending is not None and self.pending_ready else self.generation

    def in_mapping(self, uids: Collection[int]) -> set[int]:
        """Returns the nodes that count toward `min_nodes`.

        Newcomers do not count, except with `Limits.newcomers_count`: if they counted, two sides of a network partition
        that both admit newcomers could both have enough members to continue.
        """
        return {uid for uid in uids if uid < self.founders or self.limits.newcomers_count}

    def others(self) -> list[int]:
        """Returns every other node that may exist, ascending."""
        return [uid for uid in (*range(self.founders), *sorted(self.seats.known)) if uid != self.uid]

    def learn_seats(self, raw: bytes) -> None:
        """Takes over the seats that a leader sent, and reports the new ones to the owner. Raises PeerFault like
        `Seats.learn`."""
        for uid in self.seats.learn(raw):
            self.seated(uid)

    def seated(self, uid: int) -> None:
        """Adds the event that tells the owner where a newcomer listens."""
        seat = self.seats.known[uid]
        if uid != self.uid:
            self.events.append(Seated(uid, seat.control, seat.bulk, seat.key, bool(seat.via)))

    def names(self, uids: set[int]) -> str:
        """Returns "node 1, node 2" for reasons, with at most MAX_NAMED_NODES names."""
        listed = ", ".join(map(self.describe, sorted(uids)[:MAX_NAMED_NODES]))
        return f"{listed} and {len(uids) - MAX_NAMED_NODES} more" if len(uids) > MAX_NAMED_NODES else listed

    def no_answer_reason(self, uids: set[int]) -> str:
        """Returns "node 1 does not answer" or "node 1, node 2 do not answer" for reasons."""
        return f"{self.names(uids)} {'does' if len(uids) == 1 else 'do'} not answer"

    def why_not_admitted(self) -> str:
        """Returns a reason that names the nodes that this node, which is outside, asked without success."""
        if answered := self.joining.answered:
            return f"{self.names(answered)} did not admit it"
        return f"no member of the run answers, asked {self.names({*self.others()})}"

    # -- rules that the safety rests on (wire/generation.py) --------------------------------------------------

    def enough(self, generation: Generation) -> bool:
        """Returns whether a generation may come into force. For rounds to begin, at least `min_nodes` members must be
        present (point 2 of the argument), and all of `Limits.needed`."""
        counted = set(generation.members)
        if generation.first_round >= self.last_round:
            counted |= self.left
        return generation.stopping or self.limits.are_sufficient(self.in_mapping(counted))

    def is_finished(self) -> bool:
        """Returns whether this node begins no further round, so that others of its generation may have finished."""
        return self.stopping or self.position >= self.last_round

    def new_name(self, number: int) -> Name:
        return number, new_origin(self.uid, self._draw)

    @staticmethod
    def may_propose(proposer: int, name: Name) -> bool:
        """Returns whether `proposer` is the node that drew `name`."""
        return proposer_of(name[1]) == proposer

    def present_members(self) -> set[int]:
        """Returns the members of the generation that are not absent."""
        return set(self.generation.members) - self.suspects - self.failed - self.left

    # -- changes of stage -------------------------------------------------------------------------------------

    def change(self, cause: Cause) -> None:
        """Changes to the stage that `TRANSITIONS` gives for this cause."""
        self.stage = next_stage(self.stage, cause)

    def end_generation(self, reason: str) -> None:
        """Ends the generation in force for this node; the owner begins no further round of it."""
        self.change("generation over")
        self.reason = reason
        self.yields_until = 0.0
        self.watch.clear()
        self.sides.end()
        self.events.append(Broken(reason))

    def drop_attempt(self) -> None:
        """Forgets the current attempt, as a leader or as a follower."""
        self.proposal, self.pending, self.pending_ready = None, None, False

    def go_outside(self, now: float, reason: str) -> None:
        """Leaves the generation: from now on this node has no model, and it asks to join."""
        if self.stage == "steady":
            self.events.append(Broken(reason))
        self.change("excluded")
        self.drop_attempt()
        self.is_guest, self.fresh, self.reason = True, True, reason
        self.joining.begin(now)
        for known in (self.suspects, self.failed, self.joiners, self.other_generations):
            known.clear()
        self.sides.end()
        self.events.append(Outside(reason))

    # -- messages ---------------------------------------------------------------------------------------------

    def say(self, to: int, kind: type[Message], name: Name | None = None, *values: object) -> None:
        """Puts a message into the outbox. name: the generation that the message names; None: the one in force."""
        number, origin = self.generation.name if name is None else name
        self.outbox.append((to, kind(self.run, number, self.uid, *values, origin=origin)))

    def promise(self) -> Promise:
        """Returns this node's answer to `Prepare`, for the highest name that it has promised."""
        number, origin = self.promised
        lineage = encode_names([self.lineage]) if self.limits.merges else b""
        return Promise(self.run, number, self.uid, self.position, int(self.fresh), int(self.stopping), lineage,
                       origin=origin)  # fmt: skip

    def send_promise(self, to: int) -> None:
        self.outbox.append((to, self.promise()))

    def send_current(self, message: Message) -> None:
        """Answers a node of another generation or of none with the generation that this node is in, unless this node
        is about to close."""
        if not self.stopping and not self.generation.stopping:
            members = to_bitmap(self.generation.members, self.num_nodes)
            self.say(message.source, Current, None, members, int(self.steady), message.generation, message.origin)

    def send_join(self, to: int) -> None:
        self.say(to, Join, self.joining.name_for(to), PROTOCOL_VERSION, self.digest, self.num_nodes, self.seat)

    def ping_all(self) -> None:
        for uid in self.others():
            self.say(uid, Ping)


def name_of(message: Message) -> Name:
    """Returns the name of the generation that a message names."""
    return message.generation, message.origin
