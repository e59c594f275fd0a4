"""The path of payloads between nodes that one process steps in turn: they are handed over in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ClassVar

from torch import Tensor

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.path import NOTHING_LEFT, Path, PathContext, Sent, grouped
from decentnode.communication.shared_process import SharedProcess
from decentnode.payload import Payload
from decentnode.wire.bounds import Scalars

MAX_HELD = 4
"""Payloads that one node has handed to another that has not mixed them yet, or those of two rounds where a round has
more than two exchanges. What comes on top goes as chunks over the sockets, where it waits for room."""


class SameProcessPath(Path):
    """One node's. A payload that lies where the model may live (`ModelSlots`) is lent to neighbors of this process: the
    model goes on in another place until they have mixed it. Other payloads are copied, once for all of them, and so are
    those for a neighbor that has not mixed the one before: it may take long. A neighbor that is not here any more, as
    it failed and was started again by itself, is left to the sockets."""

    leaves_chunks: ClassVar[bool] = True

    def __init__(self, context: PathContext) -> None:
        super().__init__(context)
        self.generation = context.generation
        self._max_held = max(MAX_HELD, 2 * len(context.schemas))
        self._held: dict[int, int] = {}
        """Payloads of this node that a neighbor holds."""
        self._lent: dict[int, list[object]] = {}
        """Leases on the payload that was lent to a neighbor, until it lets go of it; the list is emptied then."""

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
        leases: list[object] | None = None
        own: dict[str, Tensor] = {}
        copied: dict[str, Tensor] | None = None
        for uid in uids:
            receiver, held = receivers.get(uid), self._held.get(uid, 0)
            if receiver is None or receiver.generation != self.generation or held >= self._max_held:
                if receiver is None and uid in self._lent:
                    self._lent[uid].clear()  # who is gone reads nothing any more
                left.append(uid)
                continue
            if leases is None:
                leases = [self.context.lease_of(tensor) for tensor in payload.tensors.values()]
                own = {name: tensor.detach() for name, tensor in payload.tensors.items()}
            lent = not held and None not in leases
            if not lent and copied is None:
                copied = {name: tensor.clone() for name, tensor in own.items()}
            tensors = own if lent or copied is None else copied
            self._held[uid] = held + 1
            self.context.counters.edge(uid).frames_sent += 1
            let_go = self._released(uid, leases if lent else ())
            receiver.take(key, self.context.uid, tensors, dict(payload.scalars), let_go)
        return left

    def _released(self, uid: int, leases: Iterable[object]) -> Callable[[], None]:
        """What the neighbor calls once it has read a payload; leases: dropped then."""
        kept, held = list(leases), [uid]
        if kept:
            self._lent[uid] = kept

        def let_go() -> None:
            kept.clear()
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
