"""What the nodes of a run recorded (metrics/history.py), read back, and what must hold in it whatever happened.

The same checks serve runs on machines, of which nothing else is known, and simulated ones.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentnode.errors import UsageError
from decentnode.metrics.history_kinds import HISTORY
from decentnode.wire.generation import FIRST, Name


class Violation(AssertionError):
    """Something happened that must never happen."""


class Difference(Violation):
    """A replay did something else than the run."""


def must(holds: bool, what: str) -> None:
    """Raises Violation."""
    if not holds:
        raise Violation(what)


Channel = tuple[int, int]
"""Round, and the number that tells its exchanges apart."""


@dataclass(frozen=True)
class Event:
    """One record."""

    kind: str
    fields: Mapping[str, Any]
    line: int = 0
    """Of events.jsonl, from 1 on."""
    generation: Name = FIRST
    """The one that the node was in."""
    time: float = 0.0
    """Seconds since the epoch."""

    @property
    def round(self) -> int | None:
        found = self.fields.get("round")
        return found if isinstance(found, int) else None

    @property
    def channel(self) -> Channel:
        return int(self.fields["round"]), int(self.fields["channel"])

    @property
    def name(self) -> Name:
        """Of the generation that was entered, or in which the checkpoint was made that was taken."""
        return int(self.fields["generation"]), bytes.fromhex(self.fields["origin"])

    @property
    def members(self) -> tuple[int, ...]:
        """Likewise."""
        return tuple(self.fields["members"])

    @property
    def fresh(self) -> frozenset[int]:
        """Likewise."""
        return frozenset(self.fields["fresh"])

    def uids(self, key: str) -> frozenset[int]:
        """A list of uids; empty where the record has none."""
        return frozenset(self.fields.get(key, ()))

    @property
    def sources(self) -> dict[int, str]:
        """Whose payloads were mixed whole, and their digests."""
        return {int(uid): str(digest) for uid, digest in self.fields["from"].items()}

    @property
    def partly(self) -> dict[int, int]:
        """Whose payloads were mixed in part, and up to which element."""
        return {int(uid): int(stop) for uid, (stop, _) in self.fields.get("partly", {}).items()}

    @property
    def copies(self) -> list[tuple[int, int, int, str]]:
        """What was mixed that had come into a mailbox: (source, number under which it published, age, digest)."""
        return [(int(uid), int(number), int(age), str(digest)) for uid, number, age, digest in self.fields["from"]]


@dataclass
class Life:
    """What one process recorded of its node, from its start to its end."""

    uid: int
    number: int
    """How many processes of this uid there were before."""
    path: Path
    header: Mapping[str, Any] = field(default_factory=dict)
    """Of the process: versions, threads."""
    events: list[Event] = field(default_factory=list)
    cursor: int = 0
    """How many of `events` were replayed."""
    ended: bool = False
    """Whether the node came to the end of the run, or to the end that a stop gave it."""

    @property
    def next(self) -> Event | None:
        """The first that was not replayed; None behind the last one."""
        return self.events[self.cursor] if self.cursor < len(self.events) else None

    def follows(self, kind: str) -> bool:
        """Whether this is the next one's kind."""
        return self.next is not None and self.next.kind == kind

    def ahead(self, *kinds: str, **fields: Any) -> Event | None:
        """Returns the next one of these kinds with such fields, before the node leaves its generation."""
        for each in self.events[self.cursor :]:
            if each.kind in kinds and all(each.fields.get(key) == value for key, value in fields.items()):
                return each
            if each.kind == "left":
                return None
        return None

    def add(self, kind: str, fields: Mapping[str, Any], line: int = 0, time: float = 0.0) -> None:
        """Append a record."""
        generation = self.events[-1].generation if self.events else FIRST
        event = Event(kind, fields, line, generation, time)
        if kind == "entered":
            event = Event(kind, fields, line, event.name, time)
        self.events.append(event)


def place_of(life: Life, event: Event) -> str:
    """Where in the run something was recorded."""
    again = f" (started again, process {life.number})" if life.number else ""
    round = "" if event.round is None else f", round {event.round}"
    return f"nodes/{life.path.parent.name}/{life.path.name}, line {event.line}: node {life.uid}{again}{round}"


Lives = dict[int, list[Life]]
"""By uid: the processes of a node, in the order in which they began."""


def read_lives(run: Path, num_nodes: int, newcomers: int = 0) -> Lives:
    """Reads what the nodes of a run recorded. Raises UsageError where one of them did not, or cannot be read.

    newcomers: how many nodes beyond the mapping's may have come. Their records lie elsewhere, and are left out, unless
    they were brought here (`decentnode collect`)."""
    lives = {}
    for uid in range(num_nodes + newcomers):
        path = run / "nodes" / f"{uid:03d}" / "events.jsonl"
        if uid >= num_nodes and not path.is_file():
            continue
        if not path.is_file():
            raise UsageError(f"{path} is missing: repeating a run needs the records of all {num_nodes} nodes; copy "
                             f"those of other machines into {run / 'nodes'}")  # fmt: skip
        lives[uid] = _read(path, uid)
        if not lives[uid]:
            raise UsageError(f"{path} does not record what the node did with models: a run is recorded with "
                             "run.record: true, or with auto if node.missing is not fail and models are in host "
                             "memory; older versions do not record runs")
    return lives


def _read(path: Path, uid: int) -> list[Life]:
    lives: list[Life] = []
    for line, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = json.loads(text)
            kind = found.pop("kind")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a process was killed while it wrote
        if kind in ("finished", "stopped", "left_run") and lives:
            lives[-1].ended = True
        if kind not in HISTORY:
            continue
        time = found.pop("time", 0.0)
        if kind == "recording":
            lives.append(Life(uid, len(lives), path, found))
            continue
        if not lives:
            raise UsageError(f"{path}, line {line}: {kind} comes before a process began to record")
        found.pop("uid", None)
        try:
            lives[-1].add(kind, found, line, time)
            _check_fields(lives[-1].events[-1])
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(f"{path}, line {line}: {kind} cannot be read: {error!r}") from error
    return lives


def _check_fields(event: Event) -> None:
    """Raises KeyError, ValueError or TypeError for what a replay could not read."""
    if event.kind in ("mixed", "broken_off", "sent", "published", "mixed_copies"):
        _ = event.channel
    if event.kind in ("mixed", "broken_off"):
        _ = event.sources, event.partly
    if event.kind == "mixed_copies":
        _ = event.copies
    if event.kind in ("sent", "published"):
        _ = {int(uid): str(digest) for uid, digest in event.fields["to"].items()}
    if event.kind == "entered":
        _ = event.name, event.members, event.fresh, int(event.fields["round"])
    if event.kind == "restored" and event.fields:
        _ = event.name, int(event.fields["round"]), event.fields["digest"]
    if event.kind == "resumed":
        _ = int(event.fields["round"]), int(event.fields["evaluated"]), [int(uid) for uid in event.fields["without"]]


def every_event(lives: Lives) -> Iterator[tuple[Life, Event]]:
    """Yields all records of all nodes."""
    for each in lives.values():
        for life in each:
            for event in life.events:
                yield life, event


# -- what must hold ----------------------------------------------------------------------------------------------------


def unseen(lives: Lives) -> dict[str, int]:
    """Returns of how many payloads that were mixed the source has no record here, by its uid: of newcomers."""
    found: Counter[int] = Counter()
    for _, event in every_event(lives):
        if event.kind == "mixed":
            found.update(event.sources.keys() - lives.keys())
        elif event.kind == "mixed_copies":
            found.update(source for source, *_ in event.copies if source not in lives)
    return {str(uid): found[uid] for uid in sorted(found)}


def check_payloads(lives: Lives) -> int:
    """Checks that every payload was mixed as its source sent it, to this node, in this round (or, out of a mailbox,
    under this number) and generation, and in no round twice. Returns how many there were, without those of `unseen`.
    Raises Violation."""
    sent = _digests_of("sent", lives)
    checked = _check_copies(lives)
    for one in (life for each in lives.values() for life in each):
        before: set[tuple[Name, Channel]] = set()
        for event in one.events:
            if event.kind != "mixed":
                continue
            where = f"{place_of(one, event)}: it mixed"
            must((event.generation, event.channel) not in before, f"{where} twice")
            before.add((event.generation, event.channel))
            for source, digest in event.sources.items():
                if source not in lives:
                    continue
                said = sent.get((event.generation, event.channel, source, one.uid), set())
                must(digest in said, f"{where} {digest} of node {source}, which sent it in that round "
                                     f"{', '.join(sorted(said)) or 'nothing'}")  # fmt: skip
                checked += 1
    return checked


def _digests_of(kind: str, lives: Lives) -> Mapping[tuple[Name, Channel, int, int], set[str]]:
    """Returns what was sent, by generation, channel, source and receiver."""
    found: dict[tuple[Name, Channel, int, int], set[str]] = defaultdict(set)
    for life, event in every_event(lives):
        if event.kind == kind:
            for to, digest in event.fields["to"].items():
                found[event.generation, event.channel, life.uid, int(to)].add(digest)
    return found


def _check_copies(lives: Lives) -> int:
    """As `check_payloads`, of those that came into mailboxes. One that is mixed again came when it came."""
    published, checked = _digests_of("published", lives), 0
    for one in (life for each in lives.values() for life in each):
        came: dict[tuple[Name, Channel, int], int] = {}
        mixed: set[tuple[Name, Channel, int, int]] = set()
        for event in one.events:
            for source, number, age, digest in event.copies if event.kind == "mixed_copies" else ():
                if source not in lives:
                    continue
                round, channel = event.channel
                where, which = f"{place_of(one, event)}: it mixed", (event.generation, (number, channel), source)
                said = published.get((*which, one.uid), set())
                must(digest in said, f"{where} {digest} of message {number} of node {source}, which published it under "
                                     f"that number to this node: {', '.join(sorted(said)) or 'nothing'}")  # fmt: skip
                must((*which, round) not in mixed, f"{where} message {number} of node {source} twice")
                mixed.add((*which, round))
                first = came.setdefault(which, round - age)
                must(first == round - age, f"{where} message {number} of node {source} as if it came in round "
                                           f"{round - age}, and before as if in round {first}")  # fmt: skip
                checked += 1
    return checked


def check_generations(lives: Lives, *, min_nodes: int, rounds: int, founders: int | None = None) -> int:
    """Checks that all members say the same of a generation, that each node's have ascending names, that rounds need
    `min_nodes`, and that of two generations in which rounds were mixed one ended before the other. Returns how many
    there were beside the first. Raises Violation.

    founders: how many nodes the mapping has, which alone count toward `min_nodes`; all that recorded when None."""
    founders = len(lives) if founders is None else founders
    found: dict[Name, Event] = {}
    for one in (life for each in lives.values() for life in each):
        last = FIRST
        for event in one.events:
            if event.kind != "entered":
                continue
            where = f"{place_of(one, event)}: generation {event.name[0]}"
            must(event.name > last, f"{where} follows generation {last[0]}")
            last = event.name
            other = found.setdefault(event.name, event)
            must(other.fields == event.fields, f"{where} is {dict(event.fields)}, elsewhere {dict(other.fields)}")
            must(one.uid in event.members, f"{where} is entered by a node that is not a member")
            closing = event.fields.get("stopping") or event.fields["round"] >= rounds
            counted = sum(uid < founders for uid in event.members)
            must(bool(closing) or counted >= min_nodes, f"{where} has {counted} members")
    trained = _whole_and_trained(lives, found)
    for name, members in trained.items():
        for another, theirs in trained.items():
            must(name == another or bool(members & theirs) or 2 * min_nodes <= founders,
                 f"generations {name[0]} and {another[0]} have no node in common")  # fmt: skip
    return len(found)


def _whole_and_trained(lives: Lives, found: Mapping[Name, Event]) -> dict[Name, set[int]]:
    """Members of the generations that all of them entered, and in which rounds were mixed."""
    entered: dict[Name, set[int]] = defaultdict(set)
    mixed = set()
    for life, event in every_event(lives):
        if event.kind == "entered":
            entered[event.name].add(life.uid)
        elif event.kind in ("mixed", "mixed_copies"):
            mixed.add(event.generation)
    return {name: {*event.members} for name, event in found.items()
            if entered[name] == {*event.members} & lives.keys() and name in mixed}  # fmt: skip


def takers(lives: Lives) -> set[tuple[Name, Channel, int, int]]:
    """Returns (generation, channel, source, uid) of every payload that was mixed, or a part of it."""
    return {
        (event.generation, event.channel, source, life.uid)
        for life, event in every_event(lives) if event.kind in ("mixed", "broken_off")
        for source in _sources(event)
    }  # fmt: skip


def _sources(event: Event) -> Iterable[int]:
    return {*event.sources, *event.partly}
