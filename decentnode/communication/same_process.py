"""The path of payloads between nodes that one process steps in turn: payloads are handed over in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ClassVar

from torch import Tensor

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.path import ALL_SENT, Path, PathContext, Sent, grouped
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
        self._num_held_by: dict[int, int] = {}
        """By neighbor: how many payloads of this node it holds."""
        self._leases_lent_to: dict[int, list[object]] = {}
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
        not_taken: list[int] = []
        for payload, uids in grouped(outgoing):
            not_taken += self._hand_over(key, payload, uids)
        return Sent(left=not_taken) if not_taken else ALL_SENT

    def _hand_over(self, key: ExchangeKey, payload: Payload, uids: list[int]) -> list[int]:
        """Hands the payload to neighbors of this process. Returns those of `uids` to which it could not be given."""
        receivers = {} if self._process is None else self._process.receivers
        not_taken: list[int] = []
        leases: list[object] | None = None
        own: dict[str, Tensor] = {}
        copied: dict[str, Tensor] | None = None
        for uid in uids:
            receiver, num_held = receivers.get(uid), self._num_held_by.get(uid, 0)
            if receiver is None or receiver.generation != self.generation or num_held >= self._max_held:
                if receiver is None and uid in self._leases_lent_to:
                    self._leases_lent_to[uid].clear()  # a neighbor that is gone reads nothing any more
                not_taken.append(uid)
                continue
            if leases is None:
                leases = [self.context.lease_of(tensor) for tensor in payload.tensors.values()]
                own = {name: tensor.detach() for name, tensor in payload.tensors.items()}
            lent = not num_held and None not in leases
            if not lent and copied is None:
                copied = {name: tensor.clone() for name, tensor in own.items()}
            tensors = own if lent or copied is None else copied
            self._num_held_by[uid] = num_held + 1
            self.context.counters.edge(uid).frames_sent += 1
            release = self._release_callback(uid, leases if lent else ())
            receiver.take(key, self.context.uid, tensors, dict(payload.scalars), release)
        return not_taken

    def _release_callback(self, uid: int, leases: Iterable[object]) -> Callable[[], None]:
        """Returns what the neighbor calls once it has read a payload. leases: dropped then."""
        kept_leases, unreleased = list(leases), [uid]
        if kept_leases:
            self._leases_lent_to[uid] = kept_leases

        def release() -> None:
            kept_leases.clear()
            if unreleased:
                self._num_held_by[unreleased.pop()] -= 1

        return release

    def take(
        self, key: ExchangeKey, source: int, tensors: Mapping[str, Tensor], scalars: Scalars,
        release: Callable[[], None],
    ) -> None:
        """See `LocalReceiver.take`. Raises PeerFault for a payload that no node with the same schemas sends."""
        self.context.deliver(key, source, tensors, scalars, release)

    def close(self, broken: bool) -> None:  # noqa: ARG002
        process = self._process
        if process is not None and process.receivers.get(self.context.uid) is self:
            del process.receivers[self.context.uid]
