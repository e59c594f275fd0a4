"""Encodes the headers of a node's messages, and chooses their kind of checksum. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.wire import codec, framing
from decentnode.wire.messages import Message
from decentnode.wire.session import Session


class MessageMaker:
    """Encodes the headers of one node's messages. Any thread may use it."""

    def __init__(self, session: Session, config: ZeroMQConfig) -> None:
        self.over_tcp: list[set[int]] = [set(), set()]
        """For each plane (control, bulk): the peers that are reached over TCP."""
        self.uid = session.uid
        self._session, self._checksum = session, config.checksum
        self._authenticated = (config.secure, config.secure and config.bulk_security != "none")
        """For each plane: whether its encryption detects changes."""

    def header(self, kind: type[Message], *values: object) -> bytes:
        """Returns an encoded message of this node in the generation in force. values: the fields after the common
        ones."""
        session = self._session
        return codec.encode_values(kind, (session.run, session.generation, session.uid, session.origin, *values))

    def checksum_kind(self, plane: int, uids: Collection[int]) -> int:
        """Returns the kind of checksum (wire/framing.py) for messages to these uids; NONE if encryption detects
        changes."""
        if self._authenticated[plane]:
            return framing.NONE
        if self._checksum != "auto":
            return framing.KINDS[self._checksum]
        return framing.NONE if self.over_tcp[plane].isdisjoint(uids) else framing.XXH3
