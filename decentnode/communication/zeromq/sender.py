"""Payloads that leave a node over its sockets, cut into chunks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.receive.chunking import TensorPlan, mismatch, to_bytes
from decentnode.communication.receive.staging import Fetched, Staging
from decentnode.communication.run_state import RunState
from decentnode.communication.zeromq.connections import held
from decentnode.communication.zeromq.link_driver import LinkDriver
from decentnode.communication.zeromq.link_state import BULK, QueuedMessage
from decentnode.communication.zeromq.message_maker import MessageMaker
from decentnode.communication.zeromq.room_wait import RoomWait
from decentnode.payload import Payload
from decentnode.wire.messages import Chunk, Scalars


class Sender:
    """One node's payloads, on their way to the links; used from the training thread."""

    staging: Staging | None = None
    """Slots of pinned memory, for models on a GPU."""

    def __init__(
        self, driver: LinkDriver, maker: MessageMaker, plans: tuple[tuple[TensorPlan, ...], ...], status: RunState,
        counters: Counters, *, timeout_seconds: float,
    ) -> None:
        """plans: by phase. timeout_seconds: longest wait for a peer that takes nothing."""
        self._links, self._maker, self._plans, self._status, self._counters = driver, maker, plans, status, counters
        self._timeout_seconds = timeout_seconds

    def takes(self, uid: int) -> bool:
        """Whether `may_send` would return at once."""
        return self._links.links.sender.takes(uid)

    def may_send(self, uid: int, round: int, phase: int) -> bool:
        """Blocking while `max_payloads` wait for a peer, unless it is silent; False when that stays so for too long
        (`RunState.room_patience`): the payload is not sent, and the peer hears so once it takes any."""
        links, status = self._links.links.sender, self._status
        if links.takes(uid):
            return True
        with status.changed:
            wait = RoomWait(links, status, self._counters, uid=uid, key=(round, phase),
                            timeout_seconds=self._timeout_seconds, now=clock.now())  # fmt: skip
            while not wait.step(now := clock.now()):
                status.wait(min(wait.deadline - now, 1.0))
        if wait.verdict == "withhold":
            self._links.withhold(uid, (round, phase))
            self._counters.fault("send_window", uid, f"round {round}")
        return wait.verdict == "send"

    def takes_again(self, uid: int) -> None:
        """With `LinkDriver.lock` held: a peer for which `max_payloads` waited takes payloads again."""
        with self._status.changed:
            self._status.silent.discard(uid)
            self._status.notify()

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
        plans, links = self._plans[phase], self._links
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
                links.bulk(uids, QueuedMessage.bulk(header, body, sums, lease, hold=held, last=last))
                for uid in uids:
                    self._counters.edge(uid).frames_sent += 1

    def _fetched(self, plan: TensorPlan, tensor: Tensor) -> Fetched | None:
        """A tensor on a GPU, on its path to a slot of pinned memory; None on the CPU, or while peers have not said yet
        that they got what lies in the slots: then it is copied as a whole."""
        if self.staging is None or tensor.is_cpu:
            return None
        fetched = self.staging.fetch(plan, tensor)
        if fetched is None:
            self._links.hurry()
        return fetched
