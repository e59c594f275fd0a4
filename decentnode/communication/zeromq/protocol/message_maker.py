"""Headers of the messages that a node sends, and how they are protected against corruption. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.wire import codec, framing
from decentnode.wire.messages import Message
from decentnode.wire.session import Session


class MessageMaker:
    """One node's; any thread may use it."""

    def __init__(self, session: Session, config: ZeroMQConfig) -> None:
        self.over_tcp: list[set[int]] = [set(), set()]
        """By plane (control, bulk): peers that are not behind a Unix socket."""
        self.uid = session.uid
        self._session, self._checksum = session, config.checksum
        self._authenticated = (config.secure, config.secure and config.bulk_security != "none")
        """By plane: whether encryption shows what was changed."""

    def header(self, kind: type[Message], *values: object) -> bytes:
        """An encoded message of this node in the generation in force; values: the fields behind the common ones."""
        session = self._session
        return codec.encode_values(kind, (session.run, session.generation, session.uid, session.origin, *values))

    def sum_kind(self, plane: int, uids: Collection[int]) -> int:
        """How messages to these uids are protected against corruption, beside what encryption does."""
        if self._authenticated[plane]:
            return framing.NONE
        if self._checksum != "auto":
            return framing.KINDS[self._checksum]
        return framing.NONE if self.over_tcp[plane].isdisjoint(uids) else framing.XXH3
