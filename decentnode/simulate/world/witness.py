"""Who hears what the nodes of a simulation do with models, and may check it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from decentnode.communication.base import Arrival
from decentnode.communication.parts import Collected, ExchangeKey, Schema
from decentnode.payload import Payload
from decentnode.wire.generation import Generation
from decentnode.wire.session import Session


class Witnessed(Protocol):
    """A simulated node's transport, as far as a witness looks at it."""

    uid: int
    schemas: tuple[Schema, ...]
    session: Session


class Witness:
    """Hears what a transport does, and checks it. Here it hears of everything, and of nothing that is wrong."""

    def published(self, of: Witnessed, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> None:
        """A node hands its payloads of a (round, phase) over, by neighbor."""

    def withheld(self, of: Witnessed, key: ExchangeKey, uids: Collection[int]) -> None:
        """What was published of a (round, phase) is not sent to these, which took nothing."""

    def arrived(self, of: Witnessed, key: ExchangeKey, arrival: Arrival) -> None:
        """A slice is about to be mixed; called a second time once it was."""

    def posted(self, of: Witnessed, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> None:
        """A node publishes payloads in a mailbox, by node."""

    def collected(self, of: Witnessed, channel: int, found: Collected) -> None:
        """A node takes a payload out of a mailbox."""

    def contributed(self, of: Witnessed, key: str, tensor: Tensor) -> None:
        """A node gives its part to a mean over all members."""

    def averaged(self, of: Witnessed, key: str, mean: Tensor, contributors: int) -> None:
        """That mean is there."""

    def installed(self, of: Witnessed, generation: Generation) -> None:
        """A process has put everything of its old generation away for this one."""
