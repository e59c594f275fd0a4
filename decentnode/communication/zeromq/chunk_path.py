"""Payloads cut into chunks, over the reliable links of the sockets: the path that reaches every member."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from decentnode import clock
from decentnode.communication.path import NOTHING_LEFT, Path, PathContext, Sent, grouped
from decentnode.communication.receive.inbox_state import ExchangeKey
from decentnode.communication.run_state import LONGEST_SLEEP_SECONDS
from decentnode.communication.zeromq.sender import Sender
from decentnode.payload import Payload


class ChunkPath(Path):
    """DEALER -> ROUTER sockets between hosts, Unix sockets on one host. What arrives is put into the inbox by the I/O
    thread; the sockets outlive this object, as control needs them in every generation."""

    def __init__(self, context: PathContext, sender: Sender) -> None:
        super().__init__(context)
        self._sender = sender

    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:  # noqa: ARG002
        return peers

    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:  # noqa: ARG002
        held_up = [uid for uid in outgoing if not self._sender.takes(uid)]
        if held_up:  # nobody waits for its payload because another one takes none
            self._send({uid: payload for uid, payload in outgoing.items() if uid not in held_up}, key)
            outgoing = {uid: outgoing[uid] for uid in held_up if self._may_send(uid, key)}
        self._send(outgoing, key)
        return Sent(dropped=set(held_up).difference(outgoing)) if held_up else NOTHING_LEFT

    def _may_send(self, uid: int, key: ExchangeKey) -> bool:
        """Blocking while too much waits for a peer."""
        state = self.context.state
        with state.changed:
            room = self._sender.room(uid, key, clock.now())
            while not room.step(now := clock.now()):
                state.wait(min(room.deadline - now, LONGEST_SLEEP_SECONDS))
        return self._sender.may_send(uid, key, room)

    def _send(self, outgoing: Mapping[int, Payload], key: ExchangeKey) -> None:
        for payload, uids in grouped(outgoing):
            self._sender.send_chunks(payload, uids, *key, self.context.lease_of)

    def close(self, broken: bool) -> None:
        """Nothing: the links are the transport's."""
