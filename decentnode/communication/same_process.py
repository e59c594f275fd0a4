"""The path of payloads between nodes that one process steps in turn: they are handed over in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import ClassVar

from torch import Tensor

from decentnode.communication.path import NOTHING_LEFT, Path, PathContext, Sent, grouped
from decentnode.communication.receive.inbox_state import ExchangeKey
from decentnode.communication.shared_process import SharedProcess
from decentnode.payload import Payload
from decentnode.wire.messages import Scalars

MAX_HELD = 4
"""Payloads that one node has handed to another that has not mixed them yet, or those of two rounds where a round has
more than two exchanges. What comes on top goes as chunks over the sockets, where it waits for room."""


class SameProcessPath(Path):
    """One node's. A payload is copied once, for all its neighbors of this process together: the model that it is made
    of goes on while some of them still have to be stepped. A neighbor that is not here any more, as it failed and was
    started again by itself, is left to the sockets."""

    leaves_chunks: ClassVar[bool] = True

    def __init__(self, context: PathContext) -> None:
        super().__init__(context)
        self.generation = context.generation
        self._max_held = max(MAX_HELD, 2 * len(context.schemas))
        self._held: dict[int, int] = {}
        """Payloads of this node that a neighbor holds."""

    @property
    def _process(self) -> SharedProcess | None:
        return self.context.process

    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:  # noqa: ARG002
        if self._process is not None:
            self._process.receivers[self.context.uid] = self
        return peers

    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:  # noqa: ARG002
        left: list[int] = []
        for payload, uids in grouped(outgoing):
            left += self._hand_over(key, payload, uids)
        return Sent(left=left) if left else NOTHING_LEFT

    def _hand_over(self, key: ExchangeKey, payload: Payload, uids: list[int]) -> list[int]:
        """Returns those of `uids` that could not be given the payload."""
        receivers = {} if self._process is None else self._process.receivers
        left: list[int] = []
        tensors: dict[str, Tensor] | None = None
        for uid in uids:
            receiver = receivers.get(uid)
            if receiver is None or receiver.generation != self.generation or self._held.get(uid, 0) >= self._max_held:
                left.append(uid)
                continue
            if tensors is None:
                tensors = {name: tensor.detach().clone() for name, tensor in payload.tensors.items()}
            self._held[uid] = self._held.get(uid, 0) + 1
            self.context.counters.edge(uid).frames_sent += 1
            receiver.take(key, self.context.uid, tensors, dict(payload.scalars), self._released(uid))
        return left

    def _released(self, uid: int) -> Callable[[], None]:
        held = [uid]

        def let_go() -> None:
            if held:
                self._held[held.pop()] -= 1

        return let_go

    def take(
        self, key: ExchangeKey, source: int, tensors: Mapping[str, Tensor], scalars: Scalars,
        let_go: Callable[[], None],
    ) -> None:
        """As `LocalReceiver.take`. Raises PeerFault for what no node of the same schemas sends."""
        self.context.deliver(key, source, tensors, scalars, let_go)

    def close(self, broken: bool) -> None:  # noqa: ARG002
        process = self._process
        if process is not None and process.receivers.get(self.context.uid) is self:
            del process.receivers[self.context.uid]
