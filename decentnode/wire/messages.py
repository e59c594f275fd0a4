"""Every message that nodes send to each other, as frozen dataclasses with bounded fields.

A message is sent as a prefix (wire/framing.py) and a header (a msgpack array with fixed positions). `Chunk` and `Part`
also have a body: raw little-endian tensor bytes, in a second frame if they are large. Every message that is not in
`UNNUMBERED` has a sequence number and is sent again until it is acknowledged (wire/stream.py). The bound of a field is
declared beside it (wire/bounds.py).

This file is long because it is the one list of all messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from decentnode.wire.bounds import (
    MAX_FIGURES,
    MAX_LONG_TEXT,
    Scalars,
    bounded_bytes,
    bounded_int,
    bounded_scalars,
    bounded_text,
)

PROTOCOL_VERSION = 14
RUN_ID_BYTES = 8
NO_RUN = bytes(RUN_ID_BYTES)
"""The run id in messages of a node that does not know the id of the run yet."""
ORIGIN_BYTES = 12
NO_ORIGIN = bytes(ORIGIN_BYTES)
"""The origin of the generation that a run starts with."""
NAME_BYTES, MAX_SIDES = 8 + ORIGIN_BYTES, 8
"""Bytes of a generation's name in a list of names, and most names in such a list (`Prepare.merges`)."""

MAX_NODES = 1 << 20
MAX_GENERATION = 1 << 32
MAX_ROUND = 1 << 40
SEAT_TOKEN_BYTES = 8
MAX_SEATS, MAX_SEATS_BYTES = 64, 64 * 256
"""Most nodes that a run admits beyond its mapping (`node.newcomers`), and most bytes of a list of their addresses."""
MAX_CONFIG_BYTES = 1 << 17
"""Largest experiment (YAML) that is sent to a newcomer, in bytes."""
MAX_AGE_MILLISECONDS = 1 << 40
"""Greatest age of a run: 34 years."""

REACH_UNKNOWN, REACH_DIRECT, REACH_RELAYED = 0, 1, 2
"""How others reach a newcomer, as it says itself: unknown (the node that answers finds out), directly at its address,
or only through relays."""


@dataclass(frozen=True)
class Message:
    """The fields of every message: id of the run, generation of members, and uid of the sender."""

    TYPE: ClassVar[int]
    run: bytes = bounded_bytes(RUN_ID_BYTES, exact=True)
    generation: int = bounded_int(MAX_GENERATION)
    source: int = bounded_int(MAX_NODES)
    origin: bytes = field(
        default=NO_ORIGIN, kw_only=True, metadata={"blob": ORIGIN_BYTES, "exact": True}
    )
    """The generation's origin: the uid that proposed it, and random bytes (wire/generation.py)."""


@dataclass(frozen=True)
class Hello(Message):
    """Sent to the tree parent: asks to join. `digest` covers configuration and graph."""

    TYPE: ClassVar[int] = 1
    version: int = bounded_int(1 << 16)
    digest: str = bounded_text(64)
    num_nodes: int = bounded_int(MAX_NODES)
    software: str = bounded_text(128)


@dataclass(frozen=True)
class Welcome(Message):
    """Sent to a tree child: it is admitted and adopts `run` as the id of the run."""

    TYPE: ClassVar[int] = 2


@dataclass(frozen=True)
class Reject(Message):
    """Answer to a refused `Hello`: its sender cannot be part of this run, because of `reason`.

    `digest` is that of the refused `Hello`, so that a `Hello` that another process sends with the uid of a node does
    not end that node.
    """

    TYPE: ClassVar[int] = 3
    digest: str = bounded_text(64)
    reason: str = bounded_text()


@dataclass(frozen=True)
class Present(Message):
    """Sent up the tree: these uids of the sender's subtree have joined (bit u of `uids`, little-endian bytes)."""

    TYPE: ClassVar[int] = 4
    uids: bytes = bounded_bytes(MAX_NODES // 8)


@dataclass(frozen=True)
class Refused(Message):
    """Sent up the tree: a node that claimed to be `uid` was refused."""

    TYPE: ClassVar[int] = 5
    uid: int = bounded_int(MAX_NODES)
    reason: str = bounded_text()


@dataclass(frozen=True)
class Start(Message):
    """Sent down the tree: every node of the run has joined."""

    TYPE: ClassVar[int] = 6


@dataclass(frozen=True)
class Absent(Message):
    """Sent down the tree: the deadline passed and these uids (a bitmap) never joined."""

    TYPE: ClassVar[int] = 7
    uids: bytes = bounded_bytes(MAX_NODES // 8)
    reason: str = bounded_text(MAX_LONG_TEXT)


@dataclass(frozen=True)
class Chunk(Message):
    """A piece of one tensor of a round's payload. The receiver derives its place in the tensor from its own schema."""

    TYPE: ClassVar[int] = 8
    round: int = bounded_int(MAX_ROUND)
    phase: int = bounded_int(256)
    tensor: int = bounded_int(256)
    chunk: int = bounded_int(1 << 32)
    total: int = bounded_int(1 << 48)
    """Number of elements of the whole tensor: checked against the schema, never used to allocate memory."""
    scalars: Scalars = bounded_scalars()


@dataclass(frozen=True)
class Part(Message):
    """A piece of a mean over all nodes: of a partial sum on the way up the tree, of the mean on the way down."""

    TYPE: ClassVar[int] = 9
    key: str = bounded_text(96)
    down: int = bounded_int(2)
    chunk: int = bounded_int(1 << 32)
    contributors: int = bounded_int(MAX_NODES + 1)


@dataclass(frozen=True)
class Credit(Message):
    """Sent to a sender of bulk messages (flow control): how many payload bytes it may send in total, counted from its
    first one."""

    TYPE: ClassVar[int] = 10
    allowed: int = bounded_int(1 << 62)


@dataclass(frozen=True)
class Arrive(Message):
    """A step of a barrier. Up the tree: the whole subtree of the sender has reached the barrier. Down the tree: every
    node has reached it, and may continue."""

    TYPE: ClassVar[int] = 11
    key: str = bounded_text(96)
    down: int = bounded_int(2)


@dataclass(frozen=True)
class Stop(Message):
    """Sent to every node along the tree: finish the current round, then close."""

    TYPE: ClassVar[int] = 12


@dataclass(frozen=True)
class Depart(Message):
    """Sent to the neighbors: the sender has sent its payloads of all rounds below `rounds` and sends no more."""

    TYPE: ClassVar[int] = 13
    rounds: int = bounded_int(MAX_ROUND)


@dataclass(frozen=True)
class Fail(Message):
    """Sent to every node along the tree: `uid` failed."""

    TYPE: ClassVar[int] = 14
    uid: int = bounded_int(MAX_NODES)
    reason: str = bounded_text()


@dataclass(frozen=True)
class Report(Message):
    """Sent up the tree to the lowest uid: the closing figures of `uid`."""

    TYPE: ClassVar[int] = 15
    uid: int = bounded_int(MAX_NODES)
    figures: Scalars = bounded_scalars(MAX_FIGURES)


@dataclass(frozen=True)
class Slot(Message):
    """A doorbell: the sender's payload of this round is in this slot of its publish buffer
    (communication/shared_memory/publish_buffer.py)."""

    TYPE: ClassVar[int] = 16
    round: int = bounded_int(MAX_ROUND)
    phase: int = bounded_int(256)
    slot: int = bounded_int(2)
    use: int = bounded_int(1 << 62)
    totals: bytes = bounded_bytes(8 * 64)
    """Number of elements of each tensor, 8 bytes little-endian each: checked against the schema."""
    scalars: Scalars = bounded_scalars()


@dataclass(frozen=True)
class Ack(Message):
    """Acknowledges the numbered messages of one plane that have arrived (wire/stream.py). Not numbered itself."""

    TYPE: ClassVar[int] = 17
    plane: int = bounded_int(2)
    first_missing: int = bounded_int(1 << 62)
    ahead: bytes = bounded_bytes(1 << 12)
    """Bit i: the message first_missing + 1 + i has arrived."""
    gap: int = bounded_int(2)
    """1 if a message is missing; the receiver of this acknowledgement then sends a probe."""
    probe: int = bounded_int(1 << 62)
    """The number of the probe that this acknowledgement answers, or 0."""


@dataclass(frozen=True)
class Probe(Message):
    """Sent after all other messages of a plane: asks which of those before it have not arrived. Not numbered itself."""

    TYPE: ClassVar[int] = 18
    plane: int = bounded_int(2)
    probe: int = bounded_int(1 << 62)


@dataclass(frozen=True)
class Ask(Message):
    """Asks for permission to send bulk messages. Sent only if bulk messages have keys of their own."""

    TYPE: ClassVar[int] = 19


@dataclass(frozen=True)
class Key(Message):
    """Answer to Ask, sent over CURVE: with `token` the receiver proves its identity at every login to the sender's bulk
    socket, and `key` encrypts what it sends there."""

    TYPE: ClassVar[int] = 20
    token: bytes = bounded_bytes(16, exact=True)
    key: bytes = bounded_bytes(32, exact=True)


@dataclass(frozen=True)
class Bye(Message):
    """The sender leaves: it sends nothing more and reads nothing more. Not numbered."""

    TYPE: ClassVar[int] = 21


@dataclass(frozen=True)
class Join(Message):
    """Sent to every node by a node that is outside: asks to be a member of the next generation. Other fields as in
    Hello.

    It names the generation that the receiver last reported in `Current`. A delayed copy of a Join therefore names a
    generation that is over, and is not mistaken for another restart.
    """

    TYPE: ClassVar[int] = 22
    version: int = bounded_int(1 << 16)
    digest: str = bounded_text(64)
    num_nodes: int = bounded_int(MAX_NODES)
    seat: bytes = field(default=b"", metadata={"blob": SEAT_TOKEN_BYTES, "exact": False})
    """If the sender is not in the mapping, the token of its uid (wire/membership/seats.py); empty otherwise."""


@dataclass(frozen=True)
class Suspect(Message):
    """Sent to the leader of the next generation: these members (a bitmap) do not answer. A sender that names itself has
    failed. stopping: the sender was asked to stop."""

    TYPE: ClassVar[int] = 23
    uids: bytes = bounded_bytes(MAX_NODES // 8)
    stopping: int = bounded_int(2)


@dataclass(frozen=True)
class Prepare(Message):
    """Sent to every member (a bitmap) of the proposed generation, which this message names: begin no further round.

    seats: the nodes that are not in the mapping (wire/membership/seats.py).
    """

    TYPE: ClassVar[int] = 24
    members: bytes = bounded_bytes(MAX_NODES // 8)
    seats: bytes = field(default=b"", metadata={"blob": MAX_SEATS_BYTES, "exact": False})
    merges: bytes = field(default=b"", metadata={"blob": MAX_SIDES * NAME_BYTES, "exact": False})
    """The names of the generations that continued on separate sides of a partition and merge in the proposed one
    (wire/membership/sides.py). A node that is in none of them treats the message as a delayed copy of another
    attempt."""


@dataclass(frozen=True)
class Promise(Message):
    """Answer to Prepare: the sender begins no round from `position` on. fresh: the sender has no model yet. stopping:
    it was asked to stop."""

    TYPE: ClassVar[int] = 25
    position: int = bounded_int(MAX_ROUND)
    fresh: int = bounded_int(2)
    stopping: int = bounded_int(2)
    lineage: bytes = field(default=b"", metadata={"blob": NAME_BYTES, "exact": False})
    """The name of the last generation with whose members the sender shared a common model (`MemberState.lineage`);
    empty in runs in which it does not matter."""


@dataclass(frozen=True)
class Commit(Message):
    """Sent by the leader: every member has promised this generation. Members in `fresh` (a bitmap) get a model before
    its first round. stopping: no round begins in it. merging: members come from generations that continued separately,
    and average their models before the first round."""

    TYPE: ClassVar[int] = 26
    members: bytes = bounded_bytes(MAX_NODES // 8)
    fresh: bytes = bounded_bytes(MAX_NODES // 8)
    first_round: int = bounded_int(MAX_ROUND)
    stopping: int = bounded_int(2)
    merging: int = field(default=0, metadata={"limit": 2})


@dataclass(frozen=True)
class Ready(Message):
    """Answer to Commit: the sender has released the resources of the old generation and accepts messages of the new
    one."""

    TYPE: ClassVar[int] = 27


@dataclass(frozen=True)
class Go(Message):
    """Sent by the leader: every member is ready, and the generation is in force."""

    TYPE: ClassVar[int] = 28


@dataclass(frozen=True)
class Ping(Message):
    """Asks whether a node is alive. Its I/O thread answers with Pong, whatever the training does."""

    TYPE: ClassVar[int] = 29


@dataclass(frozen=True)
class Pong(Message):
    """Answer to Ping and Suspect: the sender is alive, in the generation that this message names."""

    TYPE: ClassVar[int] = 30


@dataclass(frozen=True)
class Current(Message):
    """Sent to a node of another generation or of none: the sender's generation, which this message names, and its
    members (a bitmap). steady: it is in force, as far as the sender knows. about_generation, about_origin: the
    generation that the answered message named."""

    TYPE: ClassVar[int] = 31
    members: bytes = bounded_bytes(MAX_NODES // 8)
    steady: int = bounded_int(2)
    about_generation: int = bounded_int(MAX_GENERATION)
    about_origin: bytes = bounded_bytes(ORIGIN_BYTES, exact=True)


@dataclass(frozen=True)
class Denied(Message):
    """Answer to Join: the node can never be part of this run, because of `reason`. `digest` is that of the Join."""

    TYPE: ClassVar[int] = 32
    digest: str = bounded_text(64)
    reason: str = bounded_text()


@dataclass(frozen=True)
class Skipped(Message):
    """Sent to a neighbor that accepted no payload for too long: the sender's payloads from (round, phase) to
    (last_round, last_phase) will not arrive; those before and after will."""

    TYPE: ClassVar[int] = 33
    round: int = bounded_int(MAX_ROUND)
    phase: int = bounded_int(256)
    last_round: int = bounded_int(MAX_ROUND)
    last_phase: int = bounded_int(256)


@dataclass(frozen=True)
class Overdue(Message):
    """Sent to a neighbor whose payload is overdue: asks whether it waits for other nodes itself. Not numbered."""

    TYPE: ClassVar[int] = 34


@dataclass(frozen=True)
class Waits(Message):
    """Answer to Overdue: the sender is alive, and its training is waiting for other nodes now. Not numbered."""

    TYPE: ClassVar[int] = 35


@dataclass(frozen=True)
class Knock(Message):
    """Sent by a node that is not in the mapping and has no uid yet: asks for a uid.

    The node listens at `control` and `bulk` (tcp://ADDRESS:PORT). The message arrives on a connection of its own, on
    which the answer is sent back; run, generation and source have no meaning. reach: whether others reach the node at
    these addresses (REACH_...). invitation: see wire/invitation.py.
    """

    TYPE: ClassVar[int] = 36
    version: int = bounded_int(1 << 16)
    control: str = bounded_text(128)
    bulk: str = bounded_text(128)
    reach: int = bounded_int(3)
    invitation: str = bounded_text(128)


@dataclass(frozen=True)
class Granted(Message):
    """Answer to Knock: the newcomer gets `uid` and asks to join with the token `seat`.

    seats: as in Prepare, including the newcomer's. config: the experiment (YAML). age_milliseconds: the time since the
    run began; 0 in runs without injected faults, in which nothing depends on it.
    """

    TYPE: ClassVar[int] = 37
    uid: int = bounded_int(MAX_NODES)
    seat: bytes = bounded_bytes(SEAT_TOKEN_BYTES, exact=True)
    seats: bytes = bounded_bytes(MAX_SEATS_BYTES)
    config: bytes = bounded_bytes(MAX_CONFIG_BYTES)
    age_milliseconds: int = bounded_int(MAX_AGE_MILLISECONDS)


@dataclass(frozen=True)
class Inquiry(Message):
    """Sent by a node that is not in the mapping, before its Knock: asks for the experiment, without getting a uid."""

    TYPE: ClassVar[int] = 42
    invitation: str = bounded_text(128)


@dataclass(frozen=True)
class Described(Message):
    """Answer to Inquiry: `config` is the experiment (YAML), and `digest` its digest."""

    TYPE: ClassVar[int] = 43
    digest: str = bounded_text(64)
    config: bytes = bounded_bytes(MAX_CONFIG_BYTES)


@dataclass(frozen=True)
class Resign(Message):
    """Sent by a newcomer that was granted `uid` with the token `seat` and does not join: the uid is free again. The
    answer is a `Declined` that is final."""

    TYPE: ClassVar[int] = 44
    uid: int = bounded_int(MAX_NODES)
    seat: bytes = bounded_bytes(SEAT_TOKEN_BYTES, exact=True)


Asked = Knock | Inquiry | Resign
"""The messages that a node outside the mapping sends before it is one of the nodes."""


@dataclass(frozen=True)
class Declined(Message):
    """Answer to one of `Asked`: the request is not granted here, because of `reason`.

    final: asking again is useless. Otherwise the newcomer asks the node `uid`, which listens at `at`, or the sender
    again if `at` is empty.
    """

    TYPE: ClassVar[int] = 38
    reason: str = bounded_text()
    final: int = bounded_int(2)
    uid: int = bounded_int(MAX_NODES)
    at: str = bounded_text(128)


@dataclass(frozen=True)
class Order(Message):
    """Sent along the tree: an operator orders the run to do `action` (wire/orders.py). Up the tree (down: 0) it is a
    request to the root, which gives it a serial number. Down the tree (1) it asks every node for its Position, and to
    begin no later round before Due."""

    TYPE: ClassVar[int] = 39
    action: int = bounded_int(4)
    serial: int = bounded_int(1 << 32)
    down: int = bounded_int(2)


@dataclass(frozen=True)
class Position(Message):
    """Sent up the tree, answer to Order: no node of the sender's subtree has begun `round` or a later one, and none
    will before Due."""

    TYPE: ClassVar[int] = 40
    serial: int = bounded_int(1 << 32)
    round: int = bounded_int(MAX_ROUND)


@dataclass(frozen=True)
class Due(Message):
    """Sent down the tree: all nodes carry out the order before `round`."""

    TYPE: ClassVar[int] = 41
    serial: int = bounded_int(1 << 32)
    round: int = bounded_int(MAX_ROUND)


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
        Declined,
        Order,
        Position,
        Due,
    )
}
MEMBERSHIP = (Join, Suspect, Prepare, Promise, Commit, Ready, Go, Ping, Pong, Current, Denied)
"""Messages by which nodes agree on a generation (wire/membership/). Each names the generation that it is about."""
UNNUMBERED = (
    Hello, Welcome, Reject, Ack, Probe, Bye, Overdue, Waits, Knock, Granted, Inquiry, Described, Resign, Declined,
    *MEMBERSHIP,
)  # fmt: skip
"""Messages without a sequence number: they are repeated until they are answered, or are useless if they arrive late."""
BULK = (Chunk, Part)
"""Messages that have a body and are sent on the bulk sockets."""

FIELDS = {kind: fields(kind) for kind in MESSAGES.values()}
