"""What leaves a node over its sockets: payloads cut into chunks, the headers of all messages, checksums."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.receive.chunking import TensorPlan, mismatch, to_bytes
from decentnode.communication.receive.staging import Fetched, Staging
from decentnode.communication.run_state import RunState
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.connections import held
from decentnode.communication.zeromq.link_driver import LinkDriver
from decentnode.communication.zeromq.link_state import BULK, CONTROL, QueuedMessage
from decentnode.communication.zeromq.security import Security
from decentnode.payload import Payload
from decentnode.wire import codec, framing
from decentnode.wire.messages import Chunk, Message, Scalars
from decentnode.wire.session import Session


class Sender:
    """One node's. Payloads are sent from the training thread; `header` and `sum_kind` are any thread's."""

    staging: Staging | None = None
    """Slots of pinned memory, for models on a GPU."""

    def __init__(
        self, uid: int, config: ZeroMQConfig, session: Session, links: LinkDriver,
        plans: tuple[tuple[TensorPlan, ...], ...], status: RunState, counters: Counters, security: Security | None,
    ) -> None:
        """plans: by phase."""
        self.over_tcp: list[set[int]] = [set(), set()]
        """By plane: peers that are not behind a Unix socket."""
        self._uid, self._config, self._session, self._links, self._plans = uid, config, session, links, plans
        self._status, self._counters, self._security = status, counters, security

    def takes(self, uid: int) -> bool:
        """Whether `may_send` would return at once."""
        return self._links.links.sender.takes(uid)

    def may_send(self, uid: int, round: int, phase: int) -> bool:
        """Blocking while `max_payloads` wait for a peer, unless it is silent; False when that stays so for too long
        (`RunState.room_patience`): the payload is not sent, and once the peer takes any it is told so."""
        takes, status = self._links.links.sender.takes, self._status
        if takes(uid):
            return True
        began = clock.now()
        deadline = began + status.room_patience(self._config.timeout_seconds)
        with status.changed, status.waits_for([uid]):
            while not (taken := takes(uid)):
                status.raise_if_failed()
                remaining = deadline - clock.now()
                if status.regrouping or status.departed.get(uid, round + 1) <= round:
                    return False
                if remaining <= 0 or uid in status.silent:
                    status.give_up(uid)
                    break
                status.wait(min(remaining, 1.0))
        status.held_up(clock.now() - began, [uid], self._counters)
        if taken:
            return True
        self._links.withhold(uid, (round, phase))
        self._counters.fault("send_window", uid, f"round {round}")
        return False

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
        sums = self.sum_kind(BULK, uids)
        for index, plan in enumerate(plans):
            tensor = payload.tensors[plan.name]
            total, size = tensor.numel(), plan.spec.dtype.itemsize
            fetched = self._fetched(plan, tensor)
            raw = to_bytes(tensor) if fetched is None else memoryview(b"")
            lease = fetched.lease if fetched is not None else lease_of(tensor)
            for chunk in range(plan.count(total)):
                start, stop = plan.bounds(chunk, total)
                body = raw[start * size : stop * size] if fetched is None else fetched.piece(chunk)
                header = self.header(Chunk, round, phase, index, chunk, total, scalars)
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

    def header(self, kind: type[Message], *values: object) -> bytes:
        session = self._session
        return codec.encode_values(kind, (session.run, session.generation, self._uid, session.origin, *values))

    def sum_kind(self, plane: int, uids: Collection[int]) -> int:
        """How messages to these uids are protected against corruption, beside what encryption does."""
        if self._security is not None and (plane == CONTROL or self._security.bulk != "none"):
            return framing.NONE
        if self._config.checksum != "auto":
            return framing.KINDS[self._config.checksum]
        return framing.NONE if self.over_tcp[plane].isdisjoint(uids) else framing.XXH3
