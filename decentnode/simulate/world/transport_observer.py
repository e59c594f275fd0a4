"""An observer of what the nodes of a simulation do with models, which may check it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from decentnode.communication.base import Arrival
from decentnode.communication.parts import Collected, ExchangeKey, Schema
from decentnode.payload import Payload
from decentnode.wire.generation import Generation
from decentnode.wire.session import Session


class ObservedTransport(Protocol):
    """The part of a simulated node's transport that an observer uses."""

    uid: int
    schemas: tuple[Schema, ...]
    session: Session


class TransportObserver:
    """Is called for what a transport does with models, and may check it; this base class does nothing."""

    def on_published(self, transport: ObservedTransport, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> None:
        """A node sends its payloads of a (round, phase), by neighbor."""

    def on_withheld(self, transport: ObservedTransport, key: ExchangeKey, uids: Collection[int]) -> None:
        """The payloads published for a (round, phase) are not sent to these nodes, which accepted nothing of them."""

    def on_arrived(self, transport: ObservedTransport, key: ExchangeKey, arrival: Arrival) -> None:
        """A slice is about to be mixed; called again after it was mixed."""

    def on_posted(self, transport: ObservedTransport, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> None:
        """A node publishes payloads for mailboxes, by receiver."""

    def on_collected(self, transport: ObservedTransport, channel: int, found: Collected) -> None:
        """A node takes a payload out of a mailbox."""

    def on_contributed(self, transport: ObservedTransport, key: str, tensor: Tensor) -> None:
        """A node contributes to a mean over all members."""

    def on_averaged(self, transport: ObservedTransport, key: str, mean: Tensor, contributors: int) -> None:
        """A node receives the result of a mean."""

    def on_installed(self, transport: ObservedTransport, generation: Generation) -> None:
        """A process has replaced its old generation by this one."""
