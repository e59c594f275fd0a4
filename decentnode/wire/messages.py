"""Everything that nodes say to each other, as frozen dataclasses with bounded fields.

A message travels as a header (a msgpack array with fixed positions) behind a prefix (wire/framing.py); `Chunk` and
`Part` have raw little-endian tensor bytes behind it, in a second frame where they are many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

PROTOCOL_VERSION = 6
RUN_ID_BYTES = 8
NO_RUN = bytes(RUN_ID_BYTES)
"""Run id of a node that has not been told one yet."""
ORIGIN_BYTES = 12
NO_ORIGIN = bytes(ORIGIN_BYTES)
"""Origin of the generation that a run starts with."""

MAX_NODES = 1 << 20
MAX_GENERATION = 1 << 32
MAX_ROUND = 1 << 40
MAX_TEXT, MAX_LONG_TEXT = 512, 8192
"""Characters of a reason, and of several."""
MAX_SCALARS = 64

Scalars = Mapping[str, int | float | str]


def number(limit: int) -> Any:
    """An integer in [0, limit)."""
    return field(metadata={"limit": limit})


def text(limit: int = MAX_TEXT) -> Any:
    return field(metadata={"text": limit})


def fitting(words: str, limit: int = MAX_TEXT) -> str:
    """The first `limit` characters, spelled so that UTF-8 can hold them: lone surrogates, which stand for bytes of
    names of files that are no text, become question marks."""
    return words[:limit].encode("utf-8", "replace").decode()


def blob(limit: int, exact: bool = False) -> Any:
    return field(metadata={"blob": limit, "exact": exact})


def named_scalars() -> Any:
    """Up to MAX_SCALARS named numbers or short texts."""
    return field(metadata={"scalars": True})


@dataclass(frozen=True)
class Message:
    """What every message carries: of which run, in which generation of members, from whom."""

    TYPE: ClassVar[int]
    run: bytes = blob(RUN_ID_BYTES, exact=True)
    generation: int = number(MAX_GENERATION)
    source: int = number(MAX_NODES)
    origin: bytes = field(
        default=NO_ORIGIN, kw_only=True, metadata={"blob": ORIGIN_BYTES, "exact": True}
    )
    """Of the generation, beside its number: who proposed it, and random bytes (wire/generation.py)."""


@dataclass(frozen=True)
class Hello(Message):
    """To the tree parent: may I join? `digest` covers configuration and graph."""

    TYPE: ClassVar[int] = 1
    version: int = number(1 << 16)
    digest: str = text(64)
    num_nodes: int = number(MAX_NODES)
    software: str = text(128)


@dataclass(frozen=True)
class Welcome(Message):
    """To a child: you are in; `run` is the run's id to adopt."""

    TYPE: ClassVar[int] = 2


@dataclass(frozen=True)
class Reject(Message):
    """To whoever said hello: you cannot be part of this run, because of `reason`.

    `digest` echoes the refused hello's, so that a stranger's hello in my name cannot throw me out.
    """

    TYPE: ClassVar[int] = 3
    digest: str = text(64)
    reason: str = text()


@dataclass(frozen=True)
class Present(Message):
    """Up the tree: these uids of my subtree have joined (bit u of `uids`, little-endian bytes)."""

    TYPE: ClassVar[int] = 4
    uids: bytes = blob(MAX_NODES // 8)


@dataclass(frozen=True)
class Refused(Message):
    """Up the tree: somebody who said it was `uid` was refused."""

    TYPE: ClassVar[int] = 5
    uid: int = number(MAX_NODES)
    reason: str = text()


@dataclass(frozen=True)
class Start(Message):
    """Down the tree: everybody is here."""

    TYPE: ClassVar[int] = 6


@dataclass(frozen=True)
class Absent(Message):
    """Down the tree: the deadline passed and these uids (a bitmap) never joined."""

    TYPE: ClassVar[int] = 7
    uids: bytes = blob(MAX_NODES // 8)
    reason: str = text(MAX_LONG_TEXT)


@dataclass(frozen=True)
class Chunk(Message):
    """A piece of one tensor of a round's payload; the piece's place follows from the receiver's own schema."""

    TYPE: ClassVar[int] = 8
    round: int = number(MAX_ROUND)
    phase: int = number(256)
    tensor: int = number(256)
    chunk: int = number(1 << 32)
    total: int = number(1 << 48)
    """Elements of the whole tensor: checked against the schema, never used to allocate."""
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
    """To a sender of bulk bytes: in all you may have sent so many payload bytes to me."""

    TYPE: ClassVar[int] = 10
    allowed: int = number(1 << 62)


@dataclass(frozen=True)
class Arrive(Message):
    """A barrier: up, my whole subtree is there; down, go on."""

    TYPE: ClassVar[int] = 11
    key: str = text(96)
    down: int = number(2)


@dataclass(frozen=True)
class Stop(Message):
    """To everybody, along the tree: finish your round and close."""

    TYPE: ClassVar[int] = 12


@dataclass(frozen=True)
class Depart(Message):
    """To my neighbors: I sent payloads of rounds below `rounds`, and none after."""

    TYPE: ClassVar[int] = 13
    rounds: int = number(MAX_ROUND)


@dataclass(frozen=True)
class Fail(Message):
    """To everybody, along the tree: `uid` failed."""

    TYPE: ClassVar[int] = 14
    uid: int = number(MAX_NODES)
    reason: str = text()


@dataclass(frozen=True)
class Report(Message):
    """Up the tree to the lowest uid: closing figures of `uid`."""

    TYPE: ClassVar[int] = 15
    uid: int = number(MAX_NODES)
    figures: Scalars = named_scalars()


@dataclass(frozen=True)
class Slot(Message):
    """A doorbell: my payload of this round lies in this slot of my publish buffer
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
    """What came of the numbered messages of one plane (wire/stream.py). Not numbered itself."""

    TYPE: ClassVar[int] = 17
    plane: int = number(2)
    first_missing: int = number(1 << 62)
    ahead: bytes = blob(1 << 12)
    """Bit i: first_missing + 1 + i has come."""
    gap: int = number(2)
    """1: something was missed, send a probe."""
    probe: int = number(1 << 62)
    """The number of the probe that this answers, or 0."""


@dataclass(frozen=True)
class Probe(Message):
    """Behind everything sent so far on a plane: say what has not come. Not numbered itself."""

    TYPE: ClassVar[int] = 18
    plane: int = number(2)
    probe: int = number(1 << 62)


@dataclass(frozen=True)
class Ask(Message):
    """May I send you bulk? Only where bulk needs keys of its own."""

    TYPE: ClassVar[int] = 19


@dataclass(frozen=True)
class Key(Message):
    """Answer to Ask, over CURVE: prove with `token` at every login to my bulk socket that it is you, encrypt what you
    send there with `key`."""

    TYPE: ClassVar[int] = 20
    token: bytes = blob(16, exact=True)
    key: bytes = blob(32, exact=True)


@dataclass(frozen=True)
class Bye(Message):
    """I leave: nothing more comes from me, nothing sent to me is read. Not numbered."""

    TYPE: ClassVar[int] = 21


@dataclass(frozen=True)
class Join(Message):
    """To everybody, from outside: let me into the run's next generation. Else as Hello.

    The generation that it names is the one that the receiver last said to be in (`Current`): a late copy of a Join
    names one that is over, and is not taken for another restart.
    """

    TYPE: ClassVar[int] = 22
    version: int = number(1 << 16)
    digest: str = text(64)
    num_nodes: int = number(MAX_NODES)


@dataclass(frozen=True)
class Suspect(Message):
    """To whoever leads the next generation: these members (a bitmap) do not answer. From one of them: I failed.
    stopping: the sender was asked to stop."""

    TYPE: ClassVar[int] = 23
    uids: bytes = blob(MAX_NODES // 8)
    stopping: int = number(2)


@dataclass(frozen=True)
class Prepare(Message):
    """To every member (a bitmap) of the generation that this message names: begin no further round."""

    TYPE: ClassVar[int] = 24
    members: bytes = blob(MAX_NODES // 8)


@dataclass(frozen=True)
class Promise(Message):
    """Answer to Prepare: no round from `position` on begins here. fresh: this node has no model yet. stopping: it was
    asked to stop."""

    TYPE: ClassVar[int] = 25
    position: int = number(MAX_ROUND)
    fresh: int = number(2)
    stopping: int = number(2)


@dataclass(frozen=True)
class Commit(Message):
    """Everybody promised: this is the generation; those in `fresh` (a bitmap) get a model first. stopping: no round
    begins in it."""

    TYPE: ClassVar[int] = 26
    members: bytes = blob(MAX_NODES // 8)
    fresh: bytes = blob(MAX_NODES // 8)
    first_round: int = number(MAX_ROUND)
    stopping: int = number(2)


@dataclass(frozen=True)
class Ready(Message):
    """Answer to Commit: what belonged to the old generation is put away, messages of the new one may come."""

    TYPE: ClassVar[int] = 27


@dataclass(frozen=True)
class Go(Message):
    """Everybody is ready: the generation is in force."""

    TYPE: ClassVar[int] = 28


@dataclass(frozen=True)
class Ping(Message):
    """Do you live? Answered by Pong without waiting for the training."""

    TYPE: ClassVar[int] = 29


@dataclass(frozen=True)
class Pong(Message):
    TYPE: ClassVar[int] = 30


@dataclass(frozen=True)
class Current(Message):
    """To somebody who is not of the sender's generation, which this message names: I am in that one, with these members
    (a bitmap). steady: it is in force, as far as the sender knows. about: what the message that this answers named."""

    TYPE: ClassVar[int] = 31
    members: bytes = blob(MAX_NODES // 8)
    steady: int = number(2)
    about_generation: int = number(MAX_GENERATION)
    about_origin: bytes = blob(ORIGIN_BYTES, exact=True)


@dataclass(frozen=True)
class Denied(Message):
    """Answer to Join: you can never be part of this run, because of `reason`. `digest` echoes that of the Join."""

    TYPE: ClassVar[int] = 32
    digest: str = text(64)
    reason: str = text()


@dataclass(frozen=True)
class Skipped(Message):
    """To a neighbor: none of my payloads from (round, phase) to (last_round, last_phase) comes, as you took none for so
    long; those before and after do."""

    TYPE: ClassVar[int] = 33
    round: int = number(MAX_ROUND)
    phase: int = number(256)
    last_round: int = number(MAX_ROUND)
    last_phase: int = number(256)


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
    )
}
MEMBERSHIP = (Join, Suspect, Prepare, Promise, Commit, Ready, Go, Ping, Pong, Current, Denied)
"""How nodes agree on a generation (wire/membership/); `generation` is the one that is spoken of."""
UNNUMBERED = (Hello, Welcome, Reject, Ack, Probe, Bye, *MEMBERSHIP)
"""Said again until answered, or meaningless later: these do not stand in the stream of an edge."""
BULK = (Chunk, Part)
"""Messages that carry raw bytes behind their header and travel on the bulk sockets."""

FIELDS = {kind: fields(kind) for kind in MESSAGES.values()}
