"""The vocabulary of faults: what goes wrong with nodes and connections, where and when. One for simulated runs and for
runs on machines."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from decentnode.config.component import Settings

Share = Annotated[float, Field(ge=0, le=1)]


class Link(Settings):
    """How connections carry messages. Shares are of messages."""

    latency_seconds: float = Field(default=0.01, ge=0)
    """Shortest time on the way, in seconds."""
    jitter_seconds: float = Field(default=0.02, ge=0)
    """Longest time more, in seconds, drawn for each message. A connection keeps the order all the same."""
    bytes_per_second: float | None = Field(default=None, gt=0)
    """Bandwidth from one node to another, of all connections between them. Default: no limit."""
    queue_messages: int = Field(default=50, ge=1)
    """Messages that a connection takes before they arrive."""
    loss: Share = 0.0
    """Share of messages that do not arrive."""
    duplication: Share = 0.0
    """Share of messages that arrive twice."""
    reordering: Share = 0.0
    """Share of messages that others overtake."""
    damage: Share = 0.0
    """Share of messages of which a bit arrives flipped."""


class Fault(Settings):
    """Something that happens to nodes or connections once."""

    at_seconds: float | None = Field(default=None, ge=0)
    """When, in seconds since the start of the run."""
    at_round: int | None = Field(default=None, ge=0)
    """When: as the first of the nodes that it concerns begins this round. Instead of `at_seconds`."""

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        if (self.at_seconds is None) == (self.at_round is None):
            raise ValueError("a fault must have either at_seconds or at_round")
        return self


class _OfNodes(Fault):
    nodes: tuple[int, ...] = Field(min_length=1)
    """Uids."""

    @property
    def concerns(self) -> tuple[int, ...]:
        return self.nodes


class Kill(_OfNodes):
    """Processes end without a word."""

    do: Literal["kill"] = "kill"


class Restart(_OfNodes):
    """Processes that were killed are started again, without a model, and ask to be let in."""

    do: Literal["restart"] = "restart"


class Freeze(_OfNodes):
    """Processes are suspended, and go on afterwards."""

    do: Literal["freeze"] = "freeze"
    seconds: float = Field(gt=0)
    """For how long."""


class Slow(_OfNodes):
    """Local steps take longer."""

    do: Literal["slow"] = "slow"
    factor: float = Field(gt=0)
    """How many times as long."""
    seconds: float = Field(gt=0)
    """For how long."""


class Cut(Fault):
    """Nothing passes between two sets of nodes, in either direction, until it heals."""

    do: Literal["cut"] = "cut"
    sides: tuple[tuple[int, ...], tuple[int, ...]]
    """Uids of both sides."""
    seconds: float = Field(gt=0)
    """For how long."""

    @property
    def concerns(self) -> tuple[int, ...]:
        return (*self.sides[0], *self.sides[1])


class _OfConnection(Fault):
    source: int
    """Uid of the node that made the connection, and sends over it."""
    to: int
    """Uid of the node that it leads to."""
    plane: Literal["control", "bulk"] = "control"
    """Which of the two connections: of control messages, or of models."""

    @property
    def concerns(self) -> tuple[int, ...]:
        return self.source, self.to


class Break(_OfConnection):
    """A connection breaks, with what is under way on it; its owner hears of it and makes another."""

    do: Literal["break"] = "break"


class HalfOpen(_OfConnection):
    """A connection takes messages that do not come out of it any more, until its owner makes another."""

    do: Literal["half_open"] = "half_open"


def _kind(value: object) -> object:
    return value.get("do") if isinstance(value, dict) else getattr(value, "do", None)


AnyFault = Annotated[
    Annotated[Kill, Tag("kill")] | Annotated[Restart, Tag("restart")] | Annotated[Freeze, Tag("freeze")]
    | Annotated[Slow, Tag("slow")] | Annotated[Cut, Tag("cut")] | Annotated[Break, Tag("break")]
    | Annotated[HalfOpen, Tag("half_open")],
    Discriminator(_kind),
]  # fmt: skip


class Faults(Settings):
    """All that goes wrong in a run."""

    links: Link = Link()
    """Of all connections."""
    lossy_seconds: float | None = Field(default=None, ge=0)
    """Until when, in seconds since the start, messages are lost, repeated, overtaken and damaged by the shares of
    `links`. Default: to the end."""
    plan: tuple[AnyFault, ...] = ()
    """What happens once."""
