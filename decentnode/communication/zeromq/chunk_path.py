"""The path that reaches every member: payloads are cut into chunks and sent over the reliable links."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from decentnode import clock
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.path import ALL_SENT, Path, PathContext, Sent
from decentnode.communication.run_state import Wait, blocking
from decentnode.communication.waker import LONGEST_SLEEP_SECONDS
from decentnode.communication.zeromq.protocol.sender import Sender
from decentnode.payload import Payload


class ChunkPath(Path):
    """Sends payloads over DEALER -> ROUTER sockets: TCP between hosts, Unix sockets on one host.

    The I/O thread puts what arrives into the inbox. The sockets outlive this object, because control messages need them
    in every generation.
    """

    def __init__(self, context: PathContext, sender: Sender) -> None:
        super().__init__(context)
        self._sender = sender

    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:  # noqa: ARG002
        return peers

    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:  # noqa: ARG002
        steps = self._sender.steps(outgoing, key, self.context.lease_of, clock.now)
        dropped = blocking(steps, self._block)
        return Sent(dropped=dropped) if dropped else ALL_SENT

    def _block(self, room: Wait) -> None:
        """Blocks until the wait for room in a peer's queue is over."""
        state = self.context.state
        with state.changed:
            while not room.step(now := clock.now()):
                state.wait(min(room.deadline - now, LONGEST_SLEEP_SECONDS))

    def close(self, broken: bool) -> None:
        """Does nothing, because the links belong to the transport."""
