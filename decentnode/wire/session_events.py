"""The events that a session returns to its owner: the run began or cannot begin, a node failed or sends no more."""

from __future__ import annotations

from dataclasses import dataclass

from decentnode.wire.messages import Message
from decentnode.wire.orders import OrderEvent


@dataclass(frozen=True)
class Joined:
    """Every node of the run has joined; the first round may begin."""


@dataclass(frozen=True)
class Rejected:
    """The tree parent refused this node: it can never be part of the run."""

    reason: str


@dataclass(frozen=True)
class NotAssembled:
    """The run cannot begin, because the nodes in `missing` did not join in time."""

    missing: tuple[int, ...]
    reason: str
    """Why nodes were refused or which node did not answer; may be empty."""


@dataclass(frozen=True)
class StopAsked:
    """A node asked the run to stop; reported once."""


@dataclass(frozen=True)
class PeerFailed:
    """The node `uid` failed; reported once."""

    uid: int
    reason: str


@dataclass(frozen=True)
class PeerDeparted:
    """The node `uid` sends no payload of round `rounds` or later."""

    uid: int
    rounds: int


SessionEvent = Joined | Rejected | NotAssembled | StopAsked | PeerFailed | PeerDeparted | OrderEvent | Message
