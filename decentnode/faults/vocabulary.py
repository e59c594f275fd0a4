"""The kinds of faults: what may go wrong with nodes, connections and messages, where and when. They are used by
simulated runs and by runs on machines (the section `faults` of an experiment)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import AfterValidator, Field, Tag, ValidationInfo, field_validator, model_validator

from decentnode.config.component import Settings, discriminated_by

Share = Annotated[float, Field(ge=0, le=1)]


def _each_once(uids: tuple[int, ...]) -> tuple[int, ...]:
    repeated = next((uid for index, uid in enumerate(uids) if uid in uids[:index]), None)
    if repeated is not None:
        raise ValueError(f"must name each node once, got {repeated} twice")
    return uids


SomeUids = Annotated[tuple[int, ...], Field(min_length=1), AfterValidator(_each_once)]
Uids = SomeUids | Literal["all"]
Plane = Literal["control", "bulk"]
PLANES: tuple[Plane, ...] = ("control", "bulk")


class Link(Settings):
    """How connections carry messages. Shares are of messages."""

    latency_seconds: float = Field(default=0.01, ge=0)
    """Shortest time from sending to arrival, in seconds."""
    jitter_seconds: float = Field(default=0.02, ge=0)
    """Longest additional time, in seconds, drawn for each message. A connection keeps the order all the same."""
    bytes_per_second: float | None = Field(default=None, gt=0)
    """Bandwidth from one node to another, of all connections between them. Default: no limit."""
    buffer_bytes: int = Field(default=1 << 18, ge=0)
    """With a bandwidth: how many bytes the line between two nodes buffers and transmits in order, whichever connection
    they belong to. A control message waits behind at most this many bytes of models."""
    queue_messages: int = Field(default=50, ge=1)
    """Largest number of messages that a connection accepts before they arrive."""
    loss: Share = 0.0
    """Share of messages that do not arrive."""
    duplication: Share = 0.0
    """Share of messages that arrive twice."""
    reordering: Share = 0.0
    """Share of messages that others overtake."""
    damage: Share = 0.0
    """Share of messages that arrive with a flipped bit."""


class Fault(Settings):
    """Something that goes wrong: once, again and again, or by chance."""

    at_seconds: float | None = Field(default=None, ge=0)
    """Time of the fault, in seconds since the start of the run."""
    at_round: int | None = Field(default=None, ge=0)
    """Round of the fault: it strikes a node as that node begins this round; a fault that concerns several nodes of a
    simulated run strikes as the first of them does."""
    every_seconds: float | None = Field(default=None, gt=0)
    """Repeat the fault at this interval, in seconds, for the first time after one interval, up to `until_seconds`."""
    until_seconds: float | None = Field(default=None, gt=0)
    """With `every_seconds`: the last time at which the fault may strike, in seconds since the start of the run."""
    probability: Share | None = None
    """Probability that the fault strikes in a round, for each node that it may strike by itself."""

    _starts_at_once: ClassVar[bool] = False
    """Whether a fault without a time is in effect from the start."""

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        times = (self.at_seconds, self.at_round, self.every_seconds, self.probability)
        given = sum(each is not None for each in times)
        if given > 1 or not (given or self._starts_at_once):
            raise ValueError("a fault must have either at_seconds or at_round, or every_seconds, or probability")
        if (self.every_seconds is None) != (self.until_seconds is None):
            raise ValueError("a fault must have every_seconds and until_seconds, or neither")
        every, until = self.every_seconds or 0.0, self.until_seconds or 0.0
        if until < every:
            raise ValueError(f"until_seconds must be at least every_seconds, {every:g}, got {until:g}: the fault "
                             "first strikes after that many seconds")  # fmt: skip
        return self

    @property
    def uids(self) -> tuple[int, ...]:
        """The nodes that it names."""
        raise NotImplementedError

    @property
    def as_json(self) -> str:
        """The fault as JSON, without fields that are None."""
        return self.model_dump_json(exclude_none=True)

    def concerns(self, uid: int) -> bool:
        """Returns whether the process of this node has to apply the fault: it is one of `uids`, or, for faults of
        messages, a sender."""
        return uid in self.uids

    def times(self, draw: np.random.Generator, rounds: int) -> Iterator[dict[str, Any]]:
        """Yields when the fault occurs, as fields of resolved faults."""
        none = {"every_seconds": None, "until_seconds": None, "probability": None}
        if self.every_seconds is not None and self.until_seconds is not None:
            for i in range(math.floor(self.until_seconds / self.every_seconds)):
                yield {**none, "at_seconds": (i + 1) * self.every_seconds}
        elif self.probability is not None:
            for round in np.flatnonzero(draw.random(rounds) < self.probability):
                yield {**none, "at_round": int(round)}
        elif self.at_round is None:
            yield {"at_seconds": self.at_seconds or 0.0}
        else:
            yield {}

    def resolved(self, draw: np.random.Generator, num_nodes: int, rounds: int) -> Iterator[Self]:
        """Yields the single faults that this fault resolves to: with at_seconds or at_round, and with uids in place of
        `nodes: all`."""
        del num_nodes
        for each in self.times(draw, rounds):
            yield self.model_copy(update=each)


class _FaultOfNodes(Fault):
    nodes: Uids
    """Uids of the nodes that it may strike, or all."""
    count: int | None = Field(default=None, ge=1)
    """How many of `nodes` it strikes, drawn anew each time. Default: all of them."""

    @model_validator(mode="after")
    def _has_count_or_probability(self) -> Self:
        if self.count is not None and self.probability is not None:
            raise ValueError("a fault must have either count or probability: it strikes each node by itself")
        if self.count is not None and self.nodes != "all" and self.count > len(self.nodes):
            raise ValueError(f"count must be at most the number of nodes, {len(self.nodes)}, got {self.count}")
        return self

    @property
    def uids(self) -> tuple[int, ...]:
        return () if self.nodes == "all" else self.nodes

    def resolved(self, draw: np.random.Generator, num_nodes: int, rounds: int) -> Iterator[Self]:
        uids = tuple(range(num_nodes)) if self.nodes == "all" else self.nodes
        if self.probability is not None:
            for uid in uids:
                for each in self.times(draw, rounds):
                    yield self.model_copy(update={**each, "nodes": (uid,)})
            return
        for each in self.times(draw, rounds):
            chosen = uids
            if self.count is not None and self.count < len(uids):
                chosen = tuple(sorted(int(uid) for uid in draw.choice(uids, self.count, replace=False)))
            yield self.model_copy(update={**each, "nodes": chosen, "count": None})


class Kill(_FaultOfNodes):
    """Processes end without notice (SIGKILL)."""

    do: Literal["kill"] = "kill"
    """Which fault it is."""


class Restart(_FaultOfNodes):
    """Killed processes are started again, without a model, and ask to rejoin the run."""

    do: Literal["restart"] = "restart"
    """Which fault it is."""


class Pause(_FaultOfNodes):
    """Processes are suspended (SIGSTOP) and continue afterwards."""

    do: Literal["pause"] = "pause"
    """Which fault it is."""
    seconds: float = Field(gt=0)
    """Duration, in seconds."""


class Slow(_FaultOfNodes):
    """Local steps take longer."""

    do: Literal["slow"] = "slow"
    """Which fault it is."""
    factor: float = Field(ge=1)
    """How many times as long local steps take."""
    seconds: float | None = Field(default=None, gt=0)
    """Duration, in seconds. Default: to the end of the run."""


class FullDisk(_FaultOfNodes):
    """No file of the run can be written (ENOSPC): metrics, status, checkpoints, models. The records by which the run is
    checked (events.jsonl) are exempt."""

    do: Literal["full_disk"] = "full_disk"
    """Which fault it is."""
    seconds: float | None = Field(default=None, gt=0)
    """Duration, in seconds. Default: to the end of the run."""


class ClockJump(_FaultOfNodes):
    """The wall clock jumps, and stays where it jumped to."""

    do: Literal["clock_jump"] = "clock_jump"
    """Which fault it is."""
    by_seconds: float
    """How far it jumps: forward, or backward if negative."""


class Cut(Fault):
    """Nothing passes between two sets of nodes, in either direction, until the connection is restored."""

    do: Literal["cut"] = "cut"
    """Which fault it is."""
    sides: tuple[SomeUids, SomeUids]
    """Uids of the nodes on either side."""
    seconds: float = Field(gt=0)
    """Duration, in seconds."""

    @field_validator("sides")
    @classmethod
    def _are_disjoint(cls, sides: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        on_both = sorted({*sides[0]} & {*sides[1]})
        if on_both:
            raise ValueError(f"must have each node on only one side, got {on_both[0]} on both")
        return sides

    @property
    def uids(self) -> tuple[int, ...]:
        return (*self.sides[0], *self.sides[1])

    def separates(self, source: int, to: int) -> bool:
        """Returns whether these two nodes are on different sides."""
        one, other = self.sides
        return (source in one and to in other) or (source in other and to in one)


class _ConnectionFault(Fault):
    source: int
    """Uid of the node that made the connection and sends over it."""
    to: int
    """Uid of the node that receives over it."""
    plane: Plane = "control"
    """Which of the two connections: the one for control messages, or the one for models."""

    @field_validator("to")
    @classmethod
    def _is_another(cls, to: int, info: ValidationInfo) -> int:
        if to == info.data.get("source"):
            raise ValueError(f"must be another node than source, got {to}")
        return to

    @property
    def uids(self) -> tuple[int, ...]:
        return self.source, self.to


class Break(_ConnectionFault):
    """A connection breaks and loses what is in flight; its owner is notified and makes a new one."""

    do: Literal["break"] = "break"
    """Which fault it is."""


class HalfOpen(_ConnectionFault):
    """A connection accepts messages but no longer delivers them, until its owner makes a new one."""

    do: Literal["half_open"] = "half_open"
    """Which fault it is."""


class _MessageFault(Fault):
    """A fault of messages; without a time it is in effect from the start."""

    _starts_at_once: ClassVar[bool] = True

    seconds: float | None = Field(default=None, gt=0)
    """Duration, in seconds. Default: to the end of the run."""
    source: Uids = "all"
    """Uids of the senders whose messages are affected, or all."""
    to: Uids = "all"
    """Uids of the receivers whose messages are affected, or all."""
    plane: Plane | Literal["all"] = "all"
    """Which messages: control, models, or all."""
    share: Share = 1.0
    """Share of these messages that is affected."""

    @field_validator("to")
    @classmethod
    def _has_another(cls, to: Uids, info: ValidationInfo) -> Uids:
        source = info.data.get("source", "all")
        if to != "all" and source != "all" and len({*to, *source}) == 1:
            raise ValueError(f"must have another node than source, got only {to[0]}")
        return to

    @property
    def uids(self) -> tuple[int, ...]:
        named_uids = (each for each in (self.source, self.to) if each != "all")
        return tuple(uid for each in named_uids for uid in each)

    def concerns(self, uid: int) -> bool:
        return self.source == "all" or uid in self.source

    def applies_to(self, source: int, to: int, plane: int) -> bool:
        """Returns whether it affects messages of this connection. plane: 0 for control, 1 for models."""
        return (
            (self.source == "all" or source in self.source) and (self.to == "all" or to in self.to)
            and (self.plane == "all" or plane == PLANES.index(self.plane))
        )  # fmt: skip


class Delay(_MessageFault):
    """Messages arrive late, in their original order."""

    do: Literal["delay"] = "delay"
    """Which fault it is."""
    by_seconds: float = Field(gt=0)
    """Delay of each message, in seconds."""
    jitter_seconds: float = Field(default=0.0, ge=0)
    """Largest additional delay, drawn for each message."""


class Drop(_MessageFault):
    """Messages do not arrive."""

    do: Literal["drop"] = "drop"
    """Which fault it is."""


class Corrupt(_MessageFault):
    """A bit of a message is flipped."""

    do: Literal["corrupt"] = "corrupt"
    """Which fault it is."""


class Duplicate(_MessageFault):
    """Messages arrive twice."""

    do: Literal["duplicate"] = "duplicate"
    """Which fault it is."""


class Reorder(_MessageFault):
    """Messages are overtaken by later ones."""

    do: Literal["reorder"] = "reorder"
    """Which fault it is."""
    within_seconds: float = Field(default=0.05, gt=0)
    """Largest delay of such a message, drawn for each."""


MessageFault: TypeAlias = Delay | Drop | Corrupt | Duplicate | Reorder
"""Faults that affect each message separately."""
NetworkFault: TypeAlias = MessageFault | Cut | Break | HalfOpen
"""Faults of connections and messages between nodes."""
ProcessFault: TypeAlias = Kill | Restart | Pause
"""Faults of a whole process. A supervising process injects them; a node without a supervisor kills or pauses itself."""
NodeFault: TypeAlias = Slow | FullDisk | ClockJump
"""Faults that a node injects into itself."""


FAULTS: dict[str, str] = {
    name: f"{__name__}:{found.__name__}"
    for name, found in {
        "kill": Kill, "restart": Restart, "pause": Pause, "slow": Slow, "full_disk": FullDisk, "clock_jump": ClockJump,
        "cut": Cut, "break": Break, "half_open": HalfOpen, "delay": Delay, "drop": Drop, "corrupt": Corrupt,
        "duplicate": Duplicate, "reorder": Reorder,
    }.items()
}  # fmt: skip
"""The class of each fault, by its name (`do`)."""

AnyFault = Annotated[
    Annotated[Kill, Tag("kill")] | Annotated[Restart, Tag("restart")] | Annotated[Pause, Tag("pause")]
    | Annotated[Slow, Tag("slow")] | Annotated[FullDisk, Tag("full_disk")] | Annotated[ClockJump, Tag("clock_jump")]
    | Annotated[Cut, Tag("cut")] | Annotated[Break, Tag("break")] | Annotated[HalfOpen, Tag("half_open")]
    | Annotated[Delay, Tag("delay")] | Annotated[Drop, Tag("drop")] | Annotated[Corrupt, Tag("corrupt")]
    | Annotated[Duplicate, Tag("duplicate")] | Annotated[Reorder, Tag("reorder")],
    discriminated_by("do", FAULTS),
]  # fmt: skip


class Faults(Settings):
    """All that goes wrong in a simulated world."""

    links: Link = Link()
    """Of all connections."""
    lossy_seconds: float | None = Field(default=None, ge=0)
    """Until when, in seconds since the start, messages are lost, repeated, overtaken and damaged by the shares of
    `links`. Default: to the end."""
    plan: tuple[AnyFault, ...] = ()
    """What else happens."""
