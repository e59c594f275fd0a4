"""Reads what the nodes of a run recorded (metrics/history.py), and checks invariants that hold in every run.

The same checks serve runs on machines, of which nothing else is known, and simulated runs.
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
    """An invariant of the run was violated."""


class Difference(Violation):
    """A replay differs from the run."""


def must(holds: bool, what: str) -> None:
    """Raises Violation with this message unless `holds`."""
    if not holds:
        raise Violation(what)


Channel = tuple[int, int]
"""(round, number of the exchange within the round)."""


@dataclass(frozen=True)
class Event:
    """One record of a node."""

    kind: str
    fields: Mapping[str, Any]
    line: int = 0
    """Line number in events.jsonl, from 1 on."""
    generation: Name = FIRST
    """The generation that the node was in."""
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
        """Name of the generation that was entered, or, for `restored`, in which the checkpoint was taken."""
        return int(self.fields["generation"]), bytes.fromhex(self.fields["origin"])

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the generation that was entered."""
        return tuple(self.fields["members"])

    @property
    def fresh(self) -> frozenset[int]:
        """Members of the generation that was entered that have no model of their own."""
        return frozenset(self.fields["fresh"])

    def uids(self, key: str) -> frozenset[int]:
        """Returns a list of uids of the record as a set; empty if the record does not have it."""
        return frozenset(self.fields.get(key, ()))

    @property
    def sources(self) -> dict[int, str]:
        """The nodes whose payloads were mixed completely, with the payloads' digests."""
        return {int(uid): str(digest) for uid, digest in self.fields["from"].items()}

    @property
    def partly(self) -> dict[int, int]:
        """The nodes whose payloads were mixed in part, with the element at which that part ends."""
        return {int(uid): int(stop) for uid, (stop, _) in self.fields.get("partly", {}).items()}

    @property
    def copies(self) -> list[tuple[int, int, int, str]]:
        """The payloads from a mailbox that were mixed: (source, number under which it published, age, digest)."""
        return [(int(uid), int(number), int(age), str(digest)) for uid, number, age, digest in self.fields["from"]]


@dataclass
class ProcessRecord:
    """What one process of a node recorded, from its start to its end."""

    uid: int
    number: int
    """Number of earlier processes of this uid."""
    path: Path
    header: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the process: versions, threads."""
    events: list[Event] = field(default_factory=list)
    cursor: int = 0
    """Number of `events` that have been replayed."""
    ended: bool = False
    """Whether the node reached the end of the run, or the end that a stop request gave it."""

    @property
    def next(self) -> Event | None:
        """The first record that has not been replayed; None if all have been."""
        return self.events[self.cursor] if self.cursor < len(self.events) else None

    def next_is(self, kind: str) -> bool:
        """Returns whether the next record is of this kind."""
        return self.next is not None and self.next.kind == kind

    def find_next(self, *kinds: str, **fields: Any) -> Event | None:
        """Returns the next record of one of these kinds with these fields, before the node leaves its generation; None
        if there is none."""
        for each in self.events[self.cursor :]:
            if each.kind in kinds and all(each.fields.get(key) == value for key, value in fields.items()):
                return each
            if each.kind == "left":
                return None
        return None

    def add(self, kind: str, fields: Mapping[str, Any], line: int = 0, time: float = 0.0) -> None:
        """Appends a record."""
        generation = self.events[-1].generation if self.events else FIRST
        event = Event(kind, fields, line, generation, time)
        if kind == "entered":
            event = Event(kind, fields, line, event.name, time)
        self.events.append(event)


def place_of(life: ProcessRecord, event: Event) -> str:
    """Returns a description of where in the run something was recorded: file, line, node and round."""
    again = f" (started again, process {life.number})" if life.number else ""
    round = "" if event.round is None else f", round {event.round}"
    return f"nodes/{life.path.parent.name}/{life.path.name}, line {event.line}: node {life.uid}{again}{round}"


ProcessRecords = dict[int, list[ProcessRecord]]
"""By uid: the processes of a node, in the order in which they began."""


def read_lives(run: Path, num_nodes: int, newcomers: int = 0) -> ProcessRecords:
    """Returns what the nodes of a run recorded. Raises UsageError if a node has no records, or they cannot be read.

    newcomers: largest number of nodes beyond the mapping's that may have joined. Their records are on other machines
    and are left out, unless they were copied here (`decentnode collect`).
    """
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


def _read(path: Path, uid: int) -> list[ProcessRecord]:
    lives: list[ProcessRecord] = []
    for line, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = json.loads(text)
            kind = found.pop("kind")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the process was killed while it wrote this line
        if kind in ("finished", "stopped", "left_run") and lives:
            lives[-1].ended = True
        if kind not in HISTORY:
            continue
        time = found.pop("time", 0.0)
        if kind == "recording":
            lives.append(ProcessRecord(uid, len(lives), path, found))
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
    """Raises KeyError, ValueError or TypeError for a record that a replay could not read."""
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


def every_event(lives: ProcessRecords) -> Iterator[tuple[ProcessRecord, Event]]:
    """Yields all records of all nodes, each with the process that made it."""
    for each in lives.values():
        for life in each:
            for event in life.events:
                yield life, event


# -- invariants --------------------------------------------------------------------------------------------------------


def unseen(lives: ProcessRecords) -> dict[str, int]:
    """Returns the number of mixed payloads whose source, a newcomer, has no records here, by the source's uid."""
    found: Counter[int] = Counter()
    for _, event in every_event(lives):
        if event.kind == "mixed":
            found.update(event.sources.keys() - lives.keys())
        elif event.kind == "mixed_copies":
            found.update(source for source, *_ in event.copies if source not in lives)
    return {str(uid): found[uid] for uid in sorted(found)}


def check_payloads(lives: ProcessRecords) -> int:
    """Checks that every payload was mixed as its source sent it to this node in this round (for mailboxes: under this
    number) and generation, and at most once in a round. Returns the number of payloads checked, which leaves out those
    of `unseen`. Raises Violation."""
    sent = _digests_of("sent", lives)
    checked = _check_copies(lives)
    for one in (life for each in lives.values() for life in each):
        mixed_before: set[tuple[Name, Channel]] = set()
        for event in one.events:
            if event.kind != "mixed":
                continue
            place = f"{place_of(one, event)}: it mixed"
            must((event.generation, event.channel) not in mixed_before, f"{place} twice")
            mixed_before.add((event.generation, event.channel))
            for source, digest in event.sources.items():
                if source not in lives:
                    continue
                sent_digests = sent.get((event.generation, event.channel, source, one.uid), set())
                must(digest in sent_digests, f"{place} {digest} of node {source}, which sent it in that round "
                                     f"{', '.join(sorted(sent_digests)) or 'nothing'}")  # fmt: skip
                checked += 1
    return checked


def _digests_of(kind: str, lives: ProcessRecords) -> Mapping[tuple[Name, Channel, int, int], set[str]]:
    """Returns the digests of what was sent, by generation, channel, source and receiver."""
    found: dict[tuple[Name, Channel, int, int], set[str]] = defaultdict(set)
    for life, event in every_event(lives):
        if event.kind == kind:
            for to, digest in event.fields["to"].items():
                found[event.generation, event.channel, life.uid, int(to)].add(digest)
    return found


def _check_copies(lives: ProcessRecords) -> int:
    """Checks payloads from mailboxes, as `check_payloads` does. A payload that is mixed in several rounds must keep the
    round in which it arrived."""
    published, checked = _digests_of("published", lives), 0
    for one in (life for each in lives.values() for life in each):
        arrival_rounds: dict[tuple[Name, Channel, int], int] = {}
        mixed: set[tuple[Name, Channel, int, int]] = set()
        for event in one.events:
            for source, number, age, digest in event.copies if event.kind == "mixed_copies" else ():
                if source not in lives:
                    continue
                round, channel = event.channel
                place, which = f"{place_of(one, event)}: it mixed", (event.generation, (number, channel), source)
                sent_digests = published.get((*which, one.uid), set())
                must(digest in sent_digests, f"{place} {digest} of message {number} of node {source}, which published "
                     f"it under that number to this node: {', '.join(sorted(sent_digests)) or 'nothing'}")  # fmt: skip
                must((*which, round) not in mixed, f"{place} message {number} of node {source} twice")
                mixed.add((*which, round))
                first = arrival_rounds.setdefault(which, round - age)
                must(first == round - age, f"{place} message {number} of node {source} as if it came in round "
                                           f"{round - age}, and before as if in round {first}")  # fmt: skip
                checked += 1
    return checked


def check_generations(lives: ProcessRecords, *, min_nodes: int, rounds: int, founders: int | None = None) -> int:
    """Checks that all members agree on a generation, that the generations that a node enters have ascending names, that
    generations with rounds have `min_nodes` members, and, if `min_nodes` is a majority, that any two generations in
    which rounds were mixed have a member in common, so that one ended before the other. Returns the number of
    generations besides the first. Raises Violation.

    founders: number of nodes in the mapping, which alone count toward `min_nodes`; None: all nodes with records.
    """
    founders = len(lives) if founders is None else founders
    found: dict[Name, Event] = {}
    for one in (life for each in lives.values() for life in each):
        last = FIRST
        for event in one.events:
            if event.kind != "entered":
                continue
            place = f"{place_of(one, event)}: generation {event.name[0]}"
            must(event.name > last, f"{place} follows generation {last[0]}")
            last = event.name
            other = found.setdefault(event.name, event)
            must(other.fields == event.fields, f"{place} is {dict(event.fields)}, elsewhere {dict(other.fields)}")
            must(one.uid in event.members, f"{place} is entered by a node that is not a member")
            closing = event.fields.get("stopping") or event.fields["round"] >= rounds
            counted = sum(uid < founders for uid in event.members)
            must(bool(closing) or counted >= min_nodes, f"{place} has {counted} members")
    trained = _complete_and_trained(lives, found)
    for name, members in trained.items():
        for another, theirs in trained.items():
            must(name == another or bool(members & theirs) or 2 * min_nodes <= founders,
                 f"generations {name[0]} and {another[0]} have no node in common")  # fmt: skip
    return len(found)


def _complete_and_trained(lives: ProcessRecords, found: Mapping[Name, Event]) -> dict[Name, set[int]]:
    """Returns the members of each generation that all its members entered and in which rounds were mixed."""
    entered: dict[Name, set[int]] = defaultdict(set)
    mixed = set()
    for life, event in every_event(lives):
        if event.kind == "entered":
            entered[event.name].add(life.uid)
        elif event.kind in ("mixed", "mixed_copies"):
            mixed.add(event.generation)
    return {name: {*event.members} for name, event in found.items()
            if entered[name] == {*event.members} & lives.keys() and name in mixed}  # fmt: skip


def mixed_payloads(lives: ProcessRecords) -> set[tuple[Name, Channel, int, int]]:
    """Returns (generation, channel, source, uid) of every payload that was mixed, completely or in part."""
    return {
        (event.generation, event.channel, source, life.uid)
        for life, event in every_event(lives) if event.kind in ("mixed", "broken_off")
        for source in _sources_of(event)
    }  # fmt: skip


def _sources_of(event: Event) -> Iterable[int]:
    return {*event.sources, *event.partly}
