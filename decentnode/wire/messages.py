"""Every message that nodes send to each other, as frozen dataclasses with bounded fields.

A message travels as a prefix (wire/framing.py) and a header (a msgpack array with fixed positions). `Chunk` and `Part`
have a body as well: raw little-endian tensor bytes, in a second frame where they are large. A message that is not said
to be numbered otherwise has a sequence number and is repeated until acknowledged (wire/stream.py). The bound of a field
is declared beside it (wire/bounds.py).

This file is long because it is one list: a message is found here, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from decentnode.wire.bounds import MAX_FIGURES, MAX_LONG_TEXT, Scalars, blob, named_scalars, number, text

PROTOCOL_VERSION = 14
RUN_ID_BYTES = 8
NO_RUN = bytes(RUN_ID_BYTES)
"""The run id in messages of a node that does not know the run's yet."""
ORIGIN_BYTES = 12
NO_ORIGIN = bytes(ORIGIN_BYTES)
"""The origin of the generation that a run starts with."""
NAME_BYTES, MAX_SIDES = 8 + ORIGIN_BYTES, 8
"""Of the name of a generation in a list of names, and most names in one (`Prepare.merges`)."""

MAX_NODES = 1 << 20
MAX_GENERATION = 1 << 32
MAX_ROUND = 1 << 40
SEAT_TOKEN_BYTES = 8
MAX_SEATS, MAX_SEATS_BYTES = 64, 64 * 256
"""Most nodes that a run admits beyond its mapping (`node.newcomers`), and most bytes that say where they are."""
MAX_CONFIG_BYTES = 1 << 17
"""Of an experiment that is told to a newcomer."""
MAX_AGE_MILLISECONDS = 1 << 40
"""Since a run began: 34 years."""

REACH_UNKNOWN, REACH_DIRECT, REACH_RELAYED = 0, 1, 2
"""What a newcomer says of how others reach it: whoever answers finds out; at its address; through relays alone."""


@dataclass(frozen=True)
class Message:
    """The fields of every message: its run, its generation of members, and the uid of its sender."""

    TYPE: ClassVar[int]
    run: bytes = blob(RUN_ID_BYTES, exact=True)
    generation: int = number(MAX_GENERATION)
    source: int = number(MAX_NODES)
    origin: bytes = field(
        default=NO_ORIGIN, kw_only=True, metadata={"blob": ORIGIN_BYTES, "exact": True}
    )
    """The generation's origin: the uid that proposed it, and random bytes (wire/generation.py)."""


@dataclass(frozen=True)
class Hello(Message):
    """To the tree parent: asks to join. `digest` covers configuration and graph."""

    TYPE: ClassVar[int] = 1
    version: int = number(1 << 16)
    digest: str = text(64)
    num_nodes: int = number(MAX_NODES)
    software: str = text(128)


@dataclass(frozen=True)
class Welcome(Message):
    """To a tree child: it is admitted; `run` is the run's id, which it adopts."""

    TYPE: ClassVar[int] = 2


@dataclass(frozen=True)
class Reject(Message):
    """Answer to a refused hello: its sender cannot be part of this run, because of `reason`.

    `digest` is that of the refused hello, so that a stranger's hello with a node's uid does not end that node.
    """

    TYPE: ClassVar[int] = 3
    digest: str = text(64)
    reason: str = text()


@dataclass(frozen=True)
class Present(Message):
    """Up the tree: these uids of the sender's subtree have joined (bit u of `uids`, little-endian bytes)."""

    TYPE: ClassVar[int] = 4
    uids: bytes = blob(MAX_NODES // 8)


@dataclass(frozen=True)
class Refused(Message):
    """Up the tree: a node that claimed to be `uid` was refused."""

    TYPE: ClassVar[int] = 5
    uid: int = number(MAX_NODES)
    reason: str = text()


@dataclass(frozen=True)
class Start(Message):
    """Down the tree: every node of the run has joined."""

    TYPE: ClassVar[int] = 6


@dataclass(frozen=True)
class Absent(Message):
    """Down the tree: the deadline passed and these uids (a bitmap) never joined."""

    TYPE: ClassVar[int] = 7
    uids: bytes = blob(MAX_NODES // 8)
    reason: str = text(MAX_LONG_TEXT)


@dataclass(frozen=True)
class Chunk(Message):
    """A piece of one tensor of a round's payload. Its position in the tensor follows from the receiver's own schema."""

    TYPE: ClassVar[int] = 8
    round: int = number(MAX_ROUND)
    phase: int = number(256)
    tensor: int = number(256)
    chunk: int = number(1 << 32)
    total: int = number(1 << 48)
    """Elements of the whole tensor: checked against the schema, never used to allocate memory."""
    scalars: Scalars = named_scalars()


@dataclass(frozen=True)
class Part(Message):
    """A piece of a mean over all nodes, on its way up (a sum) or down (the mean)."""

    TYPE: ClassVar[int] = 9
    key: str = text(96)
    down: int = number(2)
    chunk: int = number(1 << 32)
    contributors: int = number(MAX_NODES + 1)


@dataclass(frozen=True)
class Credit(Message):
    """To a sender of bulk messages: how many payload bytes it may have sent in all, counted from the first."""

    TYPE: ClassVar[int] = 10
    allowed: int = number(1 << 62)


@dataclass(frozen=True)
class Arrive(Message):
    """A barrier. Up the tree: the sender's whole subtree has reached it. Down: every node has, go on."""

    TYPE: ClassVar[int] = 11
    key: str = text(96)
    down: int = number(2)


@dataclass(frozen=True)
class Stop(Message):
    """To every node, along the tree: finish the round under way, then close."""

    TYPE: ClassVar[int] = 12


@dataclass(frozen=True)
class Depart(Message):
    """To the neighbors: the sender has sent payloads of all rounds below `rounds`, and sends no more."""

    TYPE: ClassVar[int] = 13
    rounds: int = number(MAX_ROUND)


@dataclass(frozen=True)
class Fail(Message):
    """To every node, along the tree: `uid` failed."""

    TYPE: ClassVar[int] = 14
    uid: int = number(MAX_NODES)
    reason: str = text()


@dataclass(frozen=True)
class Report(Message):
    """Up the tree to the lowest uid: the closing figures of `uid`."""

    TYPE: ClassVar[int] = 15
    uid: int = number(MAX_NODES)
    figures: Scalars = named_scalars(MAX_FIGURES)


@dataclass(frozen=True)
class Slot(Message):
    """A doorbell: the sender's payload of this round lies in this slot of its publish buffer
    (communication/shared_memory/publish_buffer.py)."""

    TYPE: ClassVar[int] = 16
    round: int = number(MAX_ROUND)
    phase: int = number(256)
    slot: int = number(2)
    use: int = number(1 << 62)
    totals: bytes = blob(8 * 64)
    """Elements of each tensor, 8 bytes little-endian each: checked against the schema."""
    scalars: Scalars = named_scalars()


@dataclass(frozen=True)
class Ack(Message):
    """Which numbered messages of one plane have arrived (wire/stream.py). Not numbered itself."""

    TYPE: ClassVar[int] = 17
    plane: int = number(2)
    first_missing: int = number(1 << 62)
    ahead: bytes = blob(1 << 12)
    """Bit i: the message first_missing + 1 + i has arrived."""
    gap: int = number(2)
    """1: a message was missed; the receiver of this is to send a probe."""
    probe: int = number(1 << 62)
    """The number of the probe that this answers, or 0."""


@dataclass(frozen=True)
class Probe(Message):
    """Sent after all else on a plane: asks which messages before it have not arrived. Not numbered itself."""

    TYPE: ClassVar[int] = 18
    plane: int = number(2)
    probe: int = number(1 << 62)


@dataclass(frozen=True)
class Ask(Message):
    """Asks for permission to send bulk messages. Sent only where these have keys of their own."""

    TYPE: ClassVar[int] = 19


@dataclass(frozen=True)
class Key(Message):
    """Answer to Ask, over CURVE: `token` proves the receiver's identity at every login to the sender's bulk socket,
    `key` encrypts what it sends there."""

    TYPE: ClassVar[int] = 20
    token: bytes = blob(16, exact=True)
    key: bytes = blob(32, exact=True)


@dataclass(frozen=True)
class Bye(Message):
    """The sender leaves: it sends nothing more, and reads nothing. Not numbered."""

    TYPE: ClassVar[int] = 21


@dataclass(frozen=True)
class Join(Message):
    """From a node outside to every node: asks to be a member of the run's next generation. Other fields as in Hello.

    The generation that it names is the one that the receiver last said to be in (`Current`): a late copy of a Join
    names one that is over, and is not taken for another restart.
    """

    TYPE: ClassVar[int] = 22
    version: int = number(1 << 16)
    digest: str = text(64)
    num_nodes: int = number(MAX_NODES)
    seat: bytes = field(default=b"", metadata={"blob": SEAT_TOKEN_BYTES, "exact": False})
    """Of a node that is not in the mapping: the token of its uid (wire/membership/seats.py)."""


@dataclass(frozen=True)
class Suspect(Message):
    """To the leader of the next generation: these members (a bitmap) do not answer. A sender that names itself has
    failed. stopping: the sender was asked to stop."""

    TYPE: ClassVar[int] = 23
    uids: bytes = blob(MAX_NODES // 8)
    stopping: int = number(2)


@dataclass(frozen=True)
class Prepare(Message):
    """To every member (a bitmap) of the proposed generation, which this message names: begin no further round. seats:
    the nodes that are not in the mapping (wire/membership/seats.py)."""

    TYPE: ClassVar[int] = 24
    members: bytes = blob(MAX_NODES // 8)
    seats: bytes = field(default=b"", metadata={"blob": MAX_SEATS_BYTES, "exact": False})
    merges: bytes = field(default=b"", metadata={"blob": MAX_SIDES * NAME_BYTES, "exact": False})
    """The names of the generations that went on apart and become one with this (wire/membership/sides.py): whoever is
    in none of them takes it for a late copy of another attempt."""


@dataclass(frozen=True)
class Promise(Message):
    """Answer to Prepare: the sender begins no round from `position` on. fresh: it has no model yet. stopping: it was
    asked to stop."""

    TYPE: ClassVar[int] = 25
    position: int = number(MAX_ROUND)
    fresh: int = number(2)
    stopping: int = number(2)
    line: bytes = field(default=b"", metadata={"blob": NAME_BYTES, "exact": False})
    """The name of the last generation whose members this node's model was one with; empty where it does not matter."""


@dataclass(frozen=True)
class Commit(Message):
    """From the leader: every member has promised this generation. Members in `fresh` (a bitmap) get a model before its
    first round. stopping: no round begins in it. merging: members come from generations that went on apart, and average
    their models before it."""

    TYPE: ClassVar[int] = 26
    members: bytes = blob(MAX_NODES // 8)
    fresh: bytes = blob(MAX_NODES // 8)
    first_round: int = number(MAX_ROUND)
    stopping: int = number(2)
    merging: int = field(default=0, metadata={"limit": 2})


@dataclass(frozen=True)
class Ready(Message):
    """Answer to Commit: the sender has released what belonged to the old generation, and takes messages of the new
    one."""

    TYPE: ClassVar[int] = 27


@dataclass(frozen=True)
class Go(Message):
    """From the leader: every member is ready, the generation is in force."""

    TYPE: ClassVar[int] = 28


@dataclass(frozen=True)
class Ping(Message):
    """Asks whether a node lives. The I/O thread answers with Pong, whatever the training does."""

    TYPE: ClassVar[int] = 29


@dataclass(frozen=True)
class Pong(Message):
    """Answer to Ping and Suspect: the sender lives, in the generation that this message names."""

    TYPE: ClassVar[int] = 30


@dataclass(frozen=True)
class Current(Message):
    """To a node of another generation, or of none: the sender's generation, which this message names, and its members
    (a bitmap). steady: it is in force, as far as the sender knows. about_generation, about_origin: the generation that
    the answered message named."""

    TYPE: ClassVar[int] = 31
    members: bytes = blob(MAX_NODES // 8)
    steady: int = number(2)
    about_generation: int = number(MAX_GENERATION)
    about_origin: bytes = blob(ORIGIN_BYTES, exact=True)


@dataclass(frozen=True)
class Denied(Message):
    """Answer to Join: its sender can never be part of this run, because of `reason`. `digest` is that of the Join."""

    TYPE: ClassVar[int] = 32
    digest: str = text(64)
    reason: str = text()


@dataclass(frozen=True)
class Skipped(Message):
    """To a neighbor that took no payload for too long: the sender's payloads from (round, phase) to (last_round,
    last_phase) do not come; those before and after do."""

    TYPE: ClassVar[int] = 33
    round: int = number(MAX_ROUND)
    phase: int = number(256)
    last_round: int = number(MAX_ROUND)
    last_phase: int = number(256)


@dataclass(frozen=True)
class Overdue(Message):
    """To a neighbor whose payload is overdue: asks whether the neighbor waits for other nodes itself. Not numbered."""

    TYPE: ClassVar[int] = 34


@dataclass(frozen=True)
class Waits(Message):
    """Answer to Overdue: the sender lives, and its rounds wait for other nodes at this moment. Not numbered."""

    TYPE: ClassVar[int] = 35


@dataclass(frozen=True)
class Knock(Message):
    """From a node that is not in the mapping, which has no uid yet: asks to be granted one. It listens at `control` and
    `bulk`, as tcp://ADDRESS:PORT. It comes on a connection of its own, on which the answer goes back; run, generation
    and source mean nothing. reach: whether others reach it there (REACH_...). invitation: as wire/invitation.py."""

    TYPE: ClassVar[int] = 36
    version: int = number(1 << 16)
    control: str = text(128)
    bulk: str = text(128)
    reach: int = number(3)
    invitation: str = text(128)


@dataclass(frozen=True)
class Granted(Message):
    """Answer to Knock: the newcomer is `uid`, and asks to join with the token `seat`. `seats` as in Prepare, the
    newcomer's among them; `config` is the experiment (YAML). The run began `age_milliseconds` ago; 0 in runs without
    faults, where nothing depends on it."""

    TYPE: ClassVar[int] = 37
    uid: int = number(MAX_NODES)
    seat: bytes = blob(SEAT_TOKEN_BYTES, exact=True)
    seats: bytes = blob(MAX_SEATS_BYTES)
    config: bytes = blob(MAX_CONFIG_BYTES)
    age_milliseconds: int = number(MAX_AGE_MILLISECONDS)


@dataclass(frozen=True)
class Inquiry(Message):
    """From a node that is not in the mapping, before its Knock: asks what the experiment is, and takes no uid."""

    TYPE: ClassVar[int] = 42
    invitation: str = text(128)


@dataclass(frozen=True)
class Described(Message):
    """Answer to Inquiry: `config` is the experiment (YAML), of this digest."""

    TYPE: ClassVar[int] = 43
    digest: str = text(64)
    config: bytes = blob(MAX_CONFIG_BYTES)


@dataclass(frozen=True)
class Resign(Message):
    """From a newcomer that was granted `uid` with the token `seat` and does not come: another one may have it. The
    answer is a Turned that is final."""

    TYPE: ClassVar[int] = 44
    uid: int = number(MAX_NODES)
    seat: bytes = blob(SEAT_TOKEN_BYTES, exact=True)


Asked = Knock | Inquiry | Resign
"""What a node that is not in the mapping sends before it is one of the nodes."""


@dataclass(frozen=True)
class Turned(Message):
    """Answer to Asked: not here, because of `reason`. final: to ask again is in vain. Else `uid`, which listens at
    `at`, is to be asked, or, where that is empty, the sender once more."""

    TYPE: ClassVar[int] = 38
    reason: str = text()
    final: int = number(2)
    uid: int = number(MAX_NODES)
    at: str = text(128)


@dataclass(frozen=True)
class Order(Message):
    """Along the tree: people order the run to do `action` (wire/orders.py). Up (down 0) it is a request to the root,
    which gives it a serial number; down it asks every node for its Position, and to begin no later round before Due."""

    TYPE: ClassVar[int] = 39
    action: int = number(4)
    serial: int = number(1 << 32)
    down: int = number(2)


@dataclass(frozen=True)
class Position(Message):
    """Up the tree, answer to Order: no node of the sender's subtree has begun `round` or a later one, or begins it
    before Due."""

    TYPE: ClassVar[int] = 40
    serial: int = number(1 << 32)
    round: int = number(MAX_ROUND)


@dataclass(frozen=True)
class Due(Message):
    """Down the tree: the order is to be obeyed before `round`, by all nodes."""

    TYPE: ClassVar[int] = 41
    serial: int = number(1 << 32)
    round: int = number(MAX_ROUND)


MESSAGES: dict[int, type[Message]] = {
    message.TYPE: message
    for message in (
        Hello,
        Welcome,
        Reject,
        Present,
        Refused,
        Start,
        Absent,
        Chunk,
        Part,
        Credit,
        Arrive,
        Stop,
        Depart,
        Fail,
        Report,
        Slot,
        Ack,
        Probe,
        Ask,
        Key,
        Bye,
        Join,
        Suspect,
        Prepare,
        Promise,
        Commit,
        Ready,
        Go,
        Ping,
        Pong,
        Current,
        Denied,
        Skipped,
        Overdue,
        Waits,
        Knock,
        Granted,
        Inquiry,
        Described,
        Resign,
        Turned,
        Order,
        Position,
        Due,
    )
}
MEMBERSHIP = (Join, Suspect, Prepare, Promise, Commit, Ready, Go, Ping, Pong, Current, Denied)
"""Messages by which nodes agree on a generation (wire/membership/); they name the generation that they are about."""
UNNUMBERED = (
    Hello, Welcome, Reject, Ack, Probe, Bye, Overdue, Waits, Knock, Granted, Inquiry, Described, Resign, Turned,
    *MEMBERSHIP,
)  # fmt: skip
"""Messages without a sequence number: they are repeated until answered, or mean nothing later."""
BULK = (Chunk, Part)
"""Messages that have a body and travel on the bulk sockets."""

FIELDS = {kind: fields(kind) for kind in MESSAGES.values()}
