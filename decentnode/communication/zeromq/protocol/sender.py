"""Payloads that leave a node over its links, cut into chunks. No sockets, no threads, no clock: who waits is the
caller."""

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
    """What takes chunks (`LinkDriver`): the links, and the lock and the clock around them where threads share them."""

    def bulk(self, uids: Sequence[int], message: QueuedMessage) -> None:
        """Send a message to these peers now, or as soon as windows and sockets allow."""

    def withhold(self, uid: int, key: ExchangeKey) -> None:
        """As `LinkSender.withhold`."""

    def hurry(self) -> None:
        """Ask every peer now what it has of the bulk sent so far."""


class Sender:
    """One node's payloads, on their way to the links; used from the training thread."""

    staging: Staging | None = None
    """Slots of pinned memory, for models on a GPU."""

    def __init__(
        self, links: LinkSender, port: BulkPort, maker: MessageMaker, plans: tuple[tuple[TensorPlan, ...], ...],
        facts: RunFacts, counters: Counters, *, timeout_seconds: float, hold: Hold,
    ) -> None:
        """plans: by phase. timeout_seconds: longest wait for a peer that takes nothing. hold: how long bodies are
        kept."""
        self._links, self._port, self._maker, self._plans = links, port, maker, plans
        self._facts, self._counters = facts, counters
        self._timeout_seconds, self._hold = timeout_seconds, hold

    def takes(self, uid: int) -> bool:
        """Whether one more payload may be sent to a peer at once."""
        return self._links.takes(uid)

    def is_idle(self, uid: int) -> bool:
        """Whether nothing that was sent to a peer before waits here."""
        return self._links.waiting(uid) == 0

    def room(self, uid: int, key: ExchangeKey, now: float) -> RoomWait:
        """Returns the wait while `max_payloads` wait for a peer, unless it is silent; `may_send` has its result."""
        return RoomWait(self._links, self._facts, self._counters, uid=uid, key=key,
                        timeout_seconds=self._timeout_seconds, now=now)  # fmt: skip

    def may_send(self, uid: int, key: ExchangeKey, room: RoomWait) -> bool:
        """After the wait for room: whether to send. A payload that found none in time (`RunState.room_patience`) is
        not sent, and the peer hears so once it takes any."""
        if room.verdict == "withhold":
            self._port.withhold(uid, key)
            self._counters.fault("send_window", uid, f"round {key[0]}")
        return room.verdict == "send"

    def steps(
        self, outgoing: Mapping[int, Payload], key: ExchangeKey, lease_of: Callable[[Tensor], object],
        now: Callable[[], float],
    ) -> Steps[frozenset[int]]:
        """Send the payloads of a (round, phase) by neighbor. Returns those that take none, after a wait for each.

        lease_of: as `PathContext.lease_of`. now: the clock.
        """
        held_up = [uid for uid in outgoing if not self.takes(uid)]
        if not held_up:
            self._send(outgoing, key, lease_of)
            return _NOBODY
        # nobody waits for its payload because another one takes none
        self._send({uid: payload for uid, payload in outgoing.items() if uid not in held_up}, key, lease_of)
        dropped = set()
        for uid in held_up:
            room = self.room(uid, key, now())
            yield room
            if not self.may_send(uid, key, room):
                dropped.add(uid)
        self._send({uid: outgoing[uid] for uid in held_up if uid not in dropped}, key, lease_of)
        return frozenset(dropped)

    def _send(
        self, outgoing: Mapping[int, Payload], key: ExchangeKey, lease_of: Callable[[Tensor], object]
    ) -> None:
        for payload, uids in grouped(outgoing):
            self.send_chunks(payload, uids, *key, lease_of)

    def checked(self, payload: Payload, phase: int) -> None:
        """Raises ValueError, as our own fault, for a payload that is not what the schema says."""
        wrong = mismatch(self._plans[phase], payload.tensors)
        if wrong:
            raise ValueError(f"payload {wrong}")

    def send_chunks(
        self, payload: Payload, uids: list[int], round: int, phase: int, lease_of: Callable[[Tensor], object]
    ) -> None:
        """Hand one payload to the links of these neighbors, cut into chunks; every byte is read, or leased, before this
        returns. Not blocking, but for the copy."""
        plans = self._plans[phase]
        scalars: Scalars = payload.scalars
        sums = self._maker.sum_kind(BULK, uids)
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
        """A tensor on a GPU, on its path to a slot of pinned memory; None on the CPU, or while peers have not said yet
        that they got what lies in the slots: then it is copied as a whole."""
        if self.staging is None or tensor.is_cpu:
            return None
        fetched = self.staging.fetch(plan, tensor)
        if fetched is None:
            self._port.hurry()
        return fetched


def to_be_published(
    outgoing: Mapping[int, Payload], schema: Schema, sender: Sender, facts: RunFacts
) -> dict[int, Payload]:
    """Returns those of a mailbox's payloads that can leave without a wait: none for nodes that are gone, nor for those
    for which too much waits, which is anything where the newest payload alone is kept."""
    if facts.regrouping:
        return {}
    takes = sender.is_idle if schema.mailbox == 1 else sender.takes
    return {uid: payload for uid, payload in outgoing.items() if uid not in facts.departed and takes(uid)}
