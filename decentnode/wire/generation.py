"""Generations of members: their names, the events by which they follow each other, and why at most one is in force.

A node takes part in a round only as a member of a generation. The next one is agreed on when a member dies, freezes, is
cut off or comes back (wire/membership/); this page says why two can never train side by side.

Name. A generation is named by its number and its origin: the uid of the node that proposed it, and 8 random bytes drawn
for the proposal. The number alone is not enough: a process that was started again has forgotten what it promised, so
that two proposals may carry one number. Names are ordered, by number first; every message carries one, and a message of
another generation than the receiver's is refused.

Claim. With `Limits.min_nodes` more than half of the run's nodes (the default), at most one generation in which rounds
may begin is in force at any time. A generation is in force while the processes that got ready for it, one for each of
its members, all still belong to it.

Argument.
1. A generation comes into force only after every member promised it and released what belonged to the one before
   (Ready), and so belongs to no other. A process follows only the highest name that it promised, and the names of
   generations that it enters only grow.
2. A generation in which rounds may begin has at least `min_nodes` members: present ones. Nodes that said goodbye do not
   count toward them, as two sides of a broken network would count them both.
3. Two such generations share a uid, of which there is one process at a time, which belongs to one of the two. The other
   is not in force.

What this does not need is that a process remembers anything after its death: its uid then belongs to no generation
until it is let in anew, without a model. The price is in the models, not in the claim: where so many are started again
that no survivor of the newest generation is among those that go on, they go on from older models, and the name of the
new generation may be lower than that of the dead one. A survivor of that one is told by those who are in force; it
leaves when as many of them tell it as a generation needs: its own could not be in force beside theirs.

Where no round begins, fewer are enough. After the last round, nodes leave as they finish, and a generation that merely
evaluates counts those that left (if everybody who promised is past the last round). Once a stop was asked for, any
number may close together (`Generation.stopping`). Both kinds may exist on two sides of a broken network, and neither
trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from decentnode.wire.messages import MAX_ROUND, NO_ORIGIN, ORIGIN_BYTES

Name = tuple[int, bytes]
"""(number, origin); ordered by number first."""
FIRST: Name = (0, NO_ORIGIN)
"""The name of the generation that a run starts with."""


def new_origin(proposer: int, draw: Callable[[int], bytes]) -> bytes:
    """Returns 12 bytes that no other proposal has: the uid of the proposer (4, big-endian), then random ones.

    draw: returns so many random bytes that nobody drew before, as os.urandom does.
    """
    return proposer.to_bytes(4, "big") + draw(ORIGIN_BYTES - 4)


def proposer_of(origin: bytes) -> int:
    """The uid that drew this origin."""
    return int.from_bytes(origin[:4], "big")


@dataclass(frozen=True)
class Generation:
    """A set of members that take part in rounds from `first_round` on. `fresh` members have no model of their own
    yet."""

    number: int
    members: tuple[int, ...]
    first_round: int = 0
    fresh: frozenset[int] = frozenset()
    origin: bytes = NO_ORIGIN
    stopping: bool = False
    """A stop was asked for: no round begins, the members evaluate and close."""
    merging: bool = False
    """Members come from generations that went on apart: before its first round all models become one, their weighted
    mean."""

    @property
    def name(self) -> Name:
        return self.number, self.origin


@dataclass(frozen=True)
class Limits:
    """How long a silent node is waited for, and how small a generation may be."""

    suspect_seconds: float
    """A node from which nothing comes for so long is left out of the next generation."""
    ready_seconds: float
    """A node that lives, but is not ready for so long after the commit, is left out."""
    min_nodes: int
    """Fewest members of a generation in which rounds begin."""
    rounds: int = MAX_ROUND
    """Rounds of the run: no round begins at or after this one."""
    needed: frozenset[int] = frozenset()
    """Nodes without which no round begins: servers, for which their clients wait."""
    merges: bool = False
    """Whether all sides of a broken network go on, and become one generation once they hear each other
    (`node.on_partition: both`). The claim above then does not hold, with any `min_nodes`."""
    newcomers_count: bool = False
    """Whether nodes that are not in the mapping count toward `min_nodes`: only where it is no more than half of those
    that are, which two sides of a broken network may both have anyway."""

    def suffice(self, members: Collection[int]) -> bool:
        """Returns whether rounds may begin with these."""
        return len(members) >= self.min_nodes and self.needed.issubset(members)


@dataclass(frozen=True)
class Broken:
    """The generation in force ends: the owner begins no further round of it."""

    reason: str


@dataclass(frozen=True)
class Install:
    """All members promised: the owner releases what belonged to the old generation, then calls `installed`."""

    generation: Generation


@dataclass(frozen=True)
class Going:
    """The generation is in force."""

    generation: Generation


@dataclass(frozen=True)
class Outside:
    """This node belongs to no generation; it asks to join one."""

    reason: str


@dataclass(frozen=True)
class JoinRefused:
    """This node asked to join, and can never be a member of this run."""

    reason: str


@dataclass(frozen=True)
class Seated:
    """A node that is not in the mapping has this uid, and listens there: the owner can send to it from now on."""

    uid: int
    control: str
    bulk: str
    key: str
    relayed: bool = False
    """Whether only relays reach it there."""


@dataclass(frozen=True)
class Caller:
    """Who asks to be admitted, as far as the connection tells."""

    key: str = ""
    """Its public key (Z85), where connections prove one."""
    address: str = ""
    """The IP address from which the connection comes; "" where that is not known."""


GenerationEvent = Broken | Install | Going | Outside | JoinRefused | Seated
