"""The path of payloads between nodes that one process steps in turn: payloads are handed over in memory."""

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
"""How many payloads of one node another node may hold without having mixed them; at least the payloads of two rounds if
a round has more than two exchanges. Further payloads go as chunks over the sockets, where they wait for room."""


class SameProcessPath(Path):
    """One node's end of the path.

    A payload in memory where the model may live (`ModelSlots`) is lent to neighbors of this process: the model moves to
    another slot until they have mixed it. Other payloads are copied, once for all neighbors. So are payloads for a
    neighbor that has not mixed the previous one, as that may take long. A neighbor that is no longer in this process,
    because it failed and was restarted in a process of its own, is left to the sockets.
    """

    leaves_chunks: ClassVar[bool] = True

    def __init__(self, context: PathContext) -> None:
        super().__init__(context)
        self.generation = context.generation
        self._max_held = max(MAX_HELD, 2 * len(context.schemas))
        self._held: dict[int, int] = {}
        """By neighbor: how many payloads of this node it holds."""
        self._lent: dict[int, list[object]] = {}
        """By neighbor: leases on the payload that was lent to it. The list is emptied when the neighbor releases the
        payload."""

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
        """Hands the payload to neighbors of this process. Returns those of `uids` to which it could not be given."""
        receivers = {} if self._process is None else self._process.receivers
        left: list[int] = []
        leases: list[object] | None = None
        own: dict[str, Tensor] = {}
        copied: dict[str, Tensor] | None = None
        for uid in uids:
            receiver, held = receivers.get(uid), self._held.get(uid, 0)
            if receiver is None or receiver.generation != self.generation or held >= self._max_held:
                if receiver is None and uid in self._lent:
                    self._lent[uid].clear()  # a neighbor that is gone reads nothing any more
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
        """Returns what the neighbor calls once it has read a payload. leases: dropped then."""
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
        """See `LocalReceiver.take`. Raises PeerFault for a payload that no node with the same schemas sends."""
        self.context.deliver(key, source, tensors, scalars, let_go)

    def close(self, broken: bool) -> None:  # noqa: ARG002
        process = self._process
        if process is not None and process.receivers.get(self.context.uid) is self:
            del process.receivers[self.context.uid]
