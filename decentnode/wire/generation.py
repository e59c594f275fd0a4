"""Generations of members: their names, the events of changing from one to the next, and why at most one is in force.

A node takes part in a round only as a member of a generation. Nodes agree on the next generation when a member dies,
freezes, is cut off or comes back (wire/membership/). This docstring shows why two generations never train side by side.

Name. A generation is named by its number and its origin: the uid of the node that proposed it, and 8 random bytes drawn
for the proposal. The number alone is not enough: a restarted process has forgotten what it promised, so that two
proposals may have the same number. Names are ordered, first by number. Every message carries a name, and a node refuses
a message of another generation than its own.

Claim. If `Limits.min_nodes` is more than half of the run's nodes (the default), at most one generation in which rounds
may begin is in force at any time. A generation is in force while the processes that got ready for it, one for each of
its members, all still belong to it.

Argument.
1. A generation comes into force only after every member has promised it and released the resources of the previous one
   (Ready), and so belongs to no other. A process follows only the highest name that it has promised, and the names of
   the generations that it enters only grow.
2. A generation in which rounds may begin has at least `min_nodes` members that are present. Nodes that said goodbye do
   not count, because both sides of a network partition would count them.
3. Two such generations therefore share a uid. One process at a time has that uid, and it belongs to one of the two, so
   that the other is not in force.

The argument does not need a process to remember anything after its death: its uid then belongs to no generation until
it is admitted again, without a model. The cost is in the models, not in the claim: if so many nodes are restarted that
none of those that continue was in the newest generation, they continue from older models, and the name of the new
generation may be lower than that of the lost one. The members of the new generation tell this to a survivor of the lost
one. It leaves when as many of them have told it as a generation needs, because its own generation cannot be in force
beside theirs.

If no round begins, fewer members are enough. After the last round nodes leave as they finish, and a generation that
only evaluates also counts the nodes that left (if all that promised are past the last round). Once a stop was
requested, any number may close together (`Generation.stopping`). Both kinds may exist on both sides of a network
partition, and neither trains.
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
    """Returns 12 bytes that are unique to one proposal: the proposer's uid (4 bytes, big-endian) and random bytes.

    draw: returns the given number of random bytes, never the same twice, as os.urandom does.
    """
    return proposer.to_bytes(4, "big") + draw(ORIGIN_BYTES - 4)


def proposer_of(origin: bytes) -> int:
    """Returns the uid of the node that drew this origin."""
    return int.from_bytes(origin[:4], "big")


@dataclass(frozen=True)
class Generation:
    """A set of members that take part in rounds from `first_round` on; those in `fresh` have no model of their own
    yet."""

    number: int
    members: tuple[int, ...]
    first_round: int = 0
    fresh: frozenset[int] = frozenset()
    origin: bytes = NO_ORIGIN
    stopping: bool = False
    """A stop was requested: no round begins, the members evaluate and close."""
    merging: bool = False
    """Members come from generations that continued separately; before the first round every model is replaced by the
    weighted mean of all models."""

    @property
    def name(self) -> Name:
        return self.number, self.origin


@dataclass(frozen=True)
class Limits:
    """How long others wait for a silent node, and how small a generation may be."""

    suspect_seconds: float
    """A node that is silent for this long is left out of the next generation."""
    ready_seconds: float
    """A node that answers, but is not ready this long after the commit, is left out."""
    min_nodes: int
    """Fewest members of a generation in which rounds begin."""
    rounds: int = MAX_ROUND
    """Number of rounds of the run: no round with this index or a higher one begins."""
    needed: frozenset[int] = frozenset()
    """Nodes without which no round begins: servers, because their clients wait for them."""
    merges: bool = False
    """Whether all sides of a network partition continue, and merge into one generation once they reach each other again
    (`node.on_partition: both`). The claim above then does not hold, whatever `min_nodes` is."""
    newcomers_count: bool = False
    """Whether nodes that are not in the mapping count toward `min_nodes`. Only used if `min_nodes` is at most half of
    the nodes in the mapping, which two sides of a network partition may both have anyway."""
    setting: str = "nodes (node.min_nodes)"
    """What `min_nodes` counts and, in brackets, where it is set; for messages."""

    def are_sufficient(self, members: Collection[int]) -> bool:
        """Returns whether rounds may begin in a generation with these members."""
        return len(members) >= self.min_nodes and self.needed.issubset(members)


@dataclass(frozen=True)
class Broken:
    """The generation in force ends; the owner begins no further round of it."""

    reason: str


@dataclass(frozen=True)
class Install:
    """All members have promised; the owner releases the resources of the old generation and then calls `installed`."""

    generation: Generation


@dataclass(frozen=True)
class Going:
    """The generation is in force."""

    generation: Generation


@dataclass(frozen=True)
class Outside:
    """This node belongs to no generation and asks to join one."""

    reason: str


@dataclass(frozen=True)
class JoinRefused:
    """This node asked to join, but can never be a member of this run."""

    reason: str


@dataclass(frozen=True)
class Seated:
    """A node outside the mapping has the uid `uid` and listens at `control` and `bulk`; the owner can now send to
    it."""

    uid: int
    control: str
    bulk: str
    key: str
    relayed: bool = False
    """Whether it can be reached only through relays."""


@dataclass(frozen=True)
class Caller:
    """Who asks to be admitted, as far as the connection shows."""

    key: str = ""
    """The caller's public key (Z85); "" if connections prove no key."""
    address: str = ""
    """The IP address from which the connection comes; "" if it is not known."""


GenerationEvent = Broken | Install | Going | Outside | JoinRefused | Seated
