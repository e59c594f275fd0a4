"""Sends a node's payloads over its links, cut into chunks. No sockets, no threads, no clock; the caller does the
waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from decentnode.communication.counters import Counters
from decentnode.communication.parts import ExchangeKey, Schema
from decentnode.communication.path import grouped
from decentnode.communication.receive.chunking import TensorPlan, mismatch, to_bytes
from decentnode.communication.receive.staging import Fetched, Staging
from decentnode.communication.run_state import RunFacts, Steps
from decentnode.communication.zeromq.protocol.link_sender import LinkSender
from decentnode.communication.zeromq.protocol.link_state import BULK, Hold, QueuedMessage
from decentnode.communication.zeromq.protocol.message_maker import MessageMaker
from decentnode.communication.zeromq.protocol.room_wait import RoomWait
from decentnode.payload import Payload
from decentnode.wire.bounds import Scalars
from decentnode.wire.messages import Chunk

_NOBODY: frozenset[int] = frozenset()


class BulkPort(Protocol):
    """Accepts chunks (`LinkDriver`): the links, with the lock and the clock around them if threads share them."""

    def bulk(self, uids: Sequence[int], message: QueuedMessage) -> None:
        """Sends a message to these peers now, or as soon as windows and sockets allow."""

    def withhold(self, uid: int, key: ExchangeKey) -> None:
        """Does what `LinkSender.withhold` does."""

    def request_acks(self) -> None:
        """Probes every peer now for an acknowledgement of the bulk messages sent so far."""


class Sender:
    """Cuts one node's payloads into chunks and passes them to the links. Used by the training thread."""

    staging: Staging | None = None
    """Slots of pinned memory, if models are on a GPU."""

    def __init__(
        self, links: LinkSender, port: BulkPort, maker: MessageMaker, plans: tuple[tuple[TensorPlan, ...], ...],
        facts: RunFacts, counters: Counters, *, timeout_seconds: float, hold: Hold,
    ) -> None:
        """plans: the plans of each phase's tensors. timeout_seconds: longest wait for a peer that accepts nothing.
        hold: returns a long body in the form in which it is kept (`link_state.Hold`)."""
        self._links, self._port, self._maker, self._plans = links, port, maker, plans
        self._facts, self._counters = facts, counters
        self._timeout_seconds, self._hold = timeout_seconds, hold

    def takes(self, uid: int) -> bool:
        """Returns whether one more payload may be sent to a peer without waiting."""
        return self._links.takes(uid)

    def is_idle(self, uid: int) -> bool:
        """Returns whether no earlier payload to a peer is still queued."""
        return self._links.waiting(uid) == 0

    def room(self, uid: int, key: ExchangeKey, now: float) -> RoomWait:
        """Returns the wait for room in the queue of a peer, which ends at once for a silent peer; `may_send` then
        returns its outcome."""
        return RoomWait(self._links, self._facts, self._counters, uid=uid, key=key,
                        timeout_seconds=self._timeout_seconds, now=now)  # fmt: skip

    def may_send(self, uid: int, key: ExchangeKey, room: RoomWait) -> bool:
        """Returns whether to send after the wait for room. A payload that found no room in time
        (`RunState.room_wait_seconds`) is not sent, and the peer is told so once it accepts messages."""
        if room.verdict == "withhold":
            self._port.withhold(uid, key)
            self._counters.fault("send_window", uid, f"round {key[0]}")
        return room.verdict == "send"

    def steps(
        self, outgoing: Mapping[int, Payload], key: ExchangeKey, lease_of: Callable[[Tensor], object],
        now: Callable[[], float],
    ) -> Steps[frozenset[int]]:
        """Sends the payloads of a (round, phase), given by neighbor. Returns the neighbors that accept none, after a
        wait for each of them.

        lease_of: as in `PathContext.lease_of`. now: the clock.
        """
        full_peers = [uid for uid in outgoing if not self.takes(uid)]
        if not full_peers:
            self._send(outgoing, key, lease_of)
            return _NOBODY
        # first the neighbors with room, so that none waits because another one accepts nothing
        self._send({uid: payload for uid, payload in outgoing.items() if uid not in full_peers}, key, lease_of)
        dropped = set()
        for uid in full_peers:
            room = self.room(uid, key, now())
            yield room
            if not self.may_send(uid, key, room):
                dropped.add(uid)
        self._send({uid: outgoing[uid] for uid in full_peers if uid not in dropped}, key, lease_of)
        return frozenset(dropped)

    def _send(
        self, outgoing: Mapping[int, Payload], key: ExchangeKey, lease_of: Callable[[Tensor], object]
    ) -> None:
        for payload, uids in grouped(outgoing):
            self.send_chunks(payload, uids, *key, lease_of)

    def checked(self, payload: Payload, phase: int) -> None:
        """Raises ValueError (a bug in our own code) for a payload that does not match the schema."""
        wrong = mismatch(self._plans[phase], payload.tensors)
        if wrong:
            raise ValueError(f"payload {wrong}")

    def send_chunks(
        self, payload: Payload, uids: list[int], round: int, phase: int, lease_of: Callable[[Tensor], object]
    ) -> None:
        """Passes one payload to the links of these neighbors, cut into chunks. Every byte is read or leased before this
        returns. Does not block, except for the copy."""
        plans = self._plans[phase]
        scalars: Scalars = payload.scalars
        sums = self._maker.checksum_kind(BULK, uids)
        for index, plan in enumerate(plans):
            tensor = payload.tensors[plan.name]
            total, size = tensor.numel(), plan.spec.dtype.itemsize
            fetched = self._fetched(plan, tensor)
            raw = to_bytes(tensor) if fetched is None else memoryview(b"")
            lease = fetched.lease if fetched is not None else lease_of(tensor)
            for chunk in range(plan.count(total)):
                start, stop = plan.bounds(chunk, total)
                body = raw[start * size : stop * size] if fetched is None else fetched.piece(chunk)
                header = self._maker.header(Chunk, round, phase, index, chunk, total, scalars)
                scalars = {}
                last = index + 1 == len(plans) and chunk + 1 == plan.count(total)
                self._port.bulk(uids, QueuedMessage.bulk(header, body, sums, lease, hold=self._hold, last=last))
                for uid in uids:
                    self._counters.edge(uid).frames_sent += 1

    def _fetched(self, plan: TensorPlan, tensor: Tensor) -> Fetched | None:
        """Starts the copy of a GPU tensor to a slot of pinned memory.

        Returns None for a tensor on the CPU, and if no slot is free because peers have not acknowledged what is in the
        slots; the caller then copies the tensor as a whole.
        """
        if self.staging is None or tensor.is_cpu:
            return None
        fetched = self.staging.fetch(plan, tensor)
        if fetched is None:
            self._port.request_acks()
        return fetched


def publishable_payloads(
    outgoing: Mapping[int, Payload], schema: Schema, sender: Sender, facts: RunFacts
) -> dict[int, Payload]:
    """Returns the payloads of a mailbox that can be sent without waiting.

    Leaves out nodes that have departed or whose queue is full; if the mailbox keeps only the newest payload, any queued
    payload counts as full.
    """
    if facts.regrouping:
        return {}
    takes = sender.is_idle if schema.mailbox == 1 else sender.takes
    return {uid: payload for uid, payload in outgoing.items() if uid not in facts.departed and takes(uid)}
