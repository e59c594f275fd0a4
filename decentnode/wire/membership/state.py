"""What one node knows while its run agrees on generations, the messages that it sends, and its changes of stage."""

from __future__ import annotations

from collections.abc import Callable, Collection

from decentnode.wire.codec import bitmap
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
from decentnode.wire.membership.proposal import Proposal, Rivals
from decentnode.wire.membership.seats import Seats
from decentnode.wire.membership.sides import Sides, packed
from decentnode.wire.membership.stages import Cause, Stage, next_stage
from decentnode.wire.membership.watch import Watch
from decentnode.wire.messages import NO_RUN, PROTOCOL_VERSION, Current, Join, Message, Ping, Promise

TOLD_NODES = 20
"""How many nodes a reason names."""


class MemberState:
    """The state of one node, which leader, follower and `Membership` share.

    Absent nodes are of three kinds. `suspects` do not answer; they may be alive, and are forgotten when a generation
    with them comes into force. `failed` nodes said so themselves, or their supervisor did: they are dead until they
    join anew, whatever was promised meanwhile. Nodes that `left` said goodbye when no round was left for them; a
    goodbye before that is a failure.
    """

    def __init__(
        self, uid: int, num_nodes: int, limits: Limits, *, draw: Callable[[int], bytes], digest: str = "",
        run: bytes = NO_RUN, describe: Callable[[int], str] = lambda uid: f"node {uid}",
        founders: int | None = None, seat: bytes = b"",
    ) -> None:
        """num_nodes: uids that there can be. founders: how many of them are in the mapping, and begin the run; all when
        None. seat: of a node that is not in the mapping, the token that its uid was granted with. draw: returns so many
        random bytes (os.urandom), which keep apart what this node proposes before and after it was started again.
        digest: of configuration and graph, compared with that of nodes that ask to join. describe: a node's name in
        reasons.
        """
        self.uid, self.num_nodes, self.limits = uid, num_nodes, limits
        self.founders = num_nodes if founders is None else founders
        self.seat, self.seats = seat, Seats(self.founders, num_nodes)
        self.run = run
        self._draw = draw
        self.digest, self.describe = digest, describe
        self.generation = Generation(0, tuple(range(self.founders)))
        """The one in force, or the last that was."""
        self.stage: Stage = "steady"
        self.outbox: list[tuple[int, Message]] = []
        """(receiver, message) to send; the owner empties it."""
        self.events: list[GenerationEvent] = []
        """What the owner is told with the next return."""
        self.suspects: set[int] = set()
        self.failed: set[int] = set()
        self.left: set[int] = set()
        """Who said goodbye after the last round."""
        self.departed: set[int] = set()
        """Who said goodbye before it, and had not failed: it left in peace, until it comes back."""
        self.joiners: set[int] = set()
        """Nodes that asked to join since the generation in force began."""
        self.stopping = False
        """The owner sets it when the run is to stop. It is never reset."""
        self.position = 0
        """How many rounds are over here once the one under way is."""
        self.last_round = limits.rounds
        """How many rounds the run has, as far as this node knows: fewer than planned once an evaluation has ended it.
        The owner sets it."""
        self.fresh = False
        """Whether this node has no model yet: it came from outside."""
        self.guest = False
        """Whether this node came from outside and has not entered a generation yet."""
        self.coordinator = uid
        """The node that leads, as far as this one knows."""
        self.promised: Name = FIRST
        """The highest name that this node promised to follow, or proposed."""
        self.highest_seen: Name = FIRST
        """The highest name that others spoke of: a proposal goes above it."""
        self.reason = ""
        """Why the generation in force ended, or why none can follow it."""
        self.pending: Generation | None = None
        """The generation that all promised; not in force yet."""
        self.pending_ready = False
        """Whether this node has released what belonged to the generation before `pending`."""
        self.proposal: Proposal | None = None
        """Of the leader: the attempt under way."""
        self.coordinator_heard = 0.0
        """When the coordinator last spoke, or was first asked."""
        self.yields_until = 0.0
        """While suspecting, when not 0: until then another node may lead undisturbed."""
        self.watch = Watch(limits.suspect_seconds)
        self.rivals = Rivals(self.founders, limits)
        self.joining = JoinRequests(limits.suspect_seconds)
        self.sides = Sides(limits.suspect_seconds)
        """Of those that went on apart; used with `Limits.merges` alone."""
        self.line: Name = FIRST
        """The last generation whose members this node's model was one with: it took part in it, with a model that it
        had of that line already, was given or got by the mean of all. The owner sets it. Where members of the next one
        differ in it, their models become one first."""

    @property
    def steady(self) -> bool:
        return self.stage == "steady"

    @property
    def belongs_to(self) -> Generation:
        """The generation of this node's messages: the one in force, or the one that it is ready for."""
        return self.pending if self.pending is not None and self.pending_ready else self.generation

    def in_mapping(self, uids: Collection[int]) -> set[int]:
        """Those that count toward `min_nodes`. Newcomers do not, unless `Limits.newcomers_count`: were they counted,
        and what counts as enough grew with them, two sides of a broken network that let in others could both go on."""
        return {uid for uid in uids if uid < self.founders or self.limits.newcomers_count}

    def others(self) -> list[int]:
        """Every other node that there may be, ascending."""
        return [uid for uid in (*range(self.founders), *sorted(self.seats.known)) if uid != self.uid]

    def learn_seats(self, raw: bytes) -> None:
        """Raises PeerFault as `Seats.learn`."""
        for uid in self.seats.learn(raw):
            self.seated(uid)

    def seated(self, uid: int) -> None:
        """Tell the owner where a newcomer is."""
        seat = self.seats.known[uid]
        if uid != self.uid:
            self.events.append(Seated(uid, seat.control, seat.bulk, seat.key, bool(seat.via)))

    def names(self, uids: set[int]) -> str:
        """"node 1, node 2" for reasons; of many the first TOLD_NODES."""
        told = ", ".join(map(self.describe, sorted(uids)[:TOLD_NODES]))
        return f"{told} and {len(uids) - TOLD_NODES} more" if len(uids) > TOLD_NODES else told

    def unheard(self, uids: set[int]) -> str:
        """"node 1 does not answer", "node 1, node 2 do not answer" for reasons."""
        return f"{self.names(uids)} {'does' if len(uids) == 1 else 'do'} not answer"

    def not_let_in(self) -> str:
        """Whom this node, which is outside, has asked in vain, for reasons."""
        if answered := self.joining.answered:
            return f"{self.names(answered)} did not admit it"
        return f"no member of the run answers, asked {self.names({*self.others()})}"

    # -- rules that the safety rests on (wire/generation.py) --------------------------------------------------

    def enough(self, generation: Generation) -> bool:
        """Whether a generation may come into force: rounds need `min_nodes` that are present (point 2 there), and
        those that are needed."""
        counted = set(generation.members)
        if generation.first_round >= self.last_round:
            counted |= self.left
        return generation.stopping or self.limits.suffice(self.in_mapping(counted))

    def over(self) -> bool:
        """Whether this node begins no further round, so that others of its generation may have finished."""
        return self.stopping or self.position >= self.last_round

    def new_name(self, number: int) -> Name:
        return number, new_origin(self.uid, self._draw)

    @staticmethod
    def may_propose(proposer: int, name: Name) -> bool:
        """Whether `name` is one that this node draws."""
        return proposer_of(name[1]) == proposer

    def counted_on(self) -> set[int]:
        """Members of the generation that are not absent."""
        return set(self.generation.members) - self.suspects - self.failed - self.left

    # -- changes of stage -------------------------------------------------------------------------------------

    def change(self, cause: Cause) -> None:
        """Go to the stage that `TRANSITIONS` gives."""
        self.stage = next_stage(self.stage, cause)

    def end_generation(self, reason: str) -> None:
        """The generation in force ends for this node: the owner begins no further round of it."""
        self.change("generation over")
        self.reason = reason
        self.yields_until = 0.0
        self.watch.clear()
        self.sides.end()
        self.events.append(Broken(reason))

    def drop_attempt(self) -> None:
        """Forget the attempt under way, as a leader or as a follower."""
        self.proposal, self.pending, self.pending_ready = None, None, False

    def go_outside(self, now: float, reason: str) -> None:
        """Leave the generation: this node has no model from now on, and asks to join."""
        if self.stage == "steady":
            self.events.append(Broken(reason))
        self.change("excluded")
        self.drop_attempt()
        self.guest, self.fresh, self.reason = True, True, reason
        self.joining.begin(now)
        for known in (self.suspects, self.failed, self.joiners, self.rivals):
            known.clear()
        self.sides.end()
        self.events.append(Outside(reason))

    # -- messages ---------------------------------------------------------------------------------------------

    def say(self, to: int, kind: type[Message], name: Name | None = None, *values: object) -> None:
        """Put a message into the outbox. name: of the generation that it speaks of; None: of the one in force."""
        number, origin = self.generation.name if name is None else name
        self.outbox.append((to, kind(self.run, number, self.uid, *values, origin=origin)))

    def promise(self) -> Promise:
        """This node's answer to `Prepare`: for the highest name that it promised."""
        number, origin = self.promised
        line = packed([self.line]) if self.limits.merges else b""
        return Promise(self.run, number, self.uid, self.position, int(self.fresh), int(self.stopping), line,
                       origin=origin)  # fmt: skip

    def say_promise(self, to: int) -> None:
        self.outbox.append((to, self.promise()))

    def say_current(self, message: Message) -> None:
        """Answer a node of another generation, or of none, with the one that this node is in, unless it is about to
        close."""
        if not self.stopping and not self.generation.stopping:
            members = bitmap(self.generation.members, self.num_nodes)
            self.say(message.source, Current, None, members, int(self.steady), message.generation, message.origin)

    def say_join(self, to: int) -> None:
        self.say(to, Join, self.joining.name_for(to), PROTOCOL_VERSION, self.digest, self.num_nodes, self.seat)

    def ping_all(self) -> None:
        for uid in self.others():
            self.say(uid, Ping)


def name_of(message: Message) -> Name:
    """The name of the generation that a message speaks of."""
    return message.generation, message.origin
