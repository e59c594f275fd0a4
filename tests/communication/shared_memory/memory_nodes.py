"""The shared-memory part of nodes, without sockets or threads, for tests that step it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.path import PathContext
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.staging import Leases
from decentnode.communication.routing import Routing
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_memory.layout import SLOTS
from decentnode.communication.shared_memory.model_slots import ModelSlots
from decentnode.communication.shared_memory.path import SharedMemoryPath
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import PeerFault
from decentnode.payload import Payload
from decentnode.wire.generation import FIRST
from tests.communication.contract import flat_schema

RUN, ELEMENTS = b"run-id-8", 8


class MemoryNode:
    """One node's publish buffers, model slots, doorbell and inbox."""

    def __init__(
        self, uid: int, n: int, schemas: tuple[Schema, ...], folder: Path, barrier: Callable[..., object] | None = None
    ) -> None:
        self.uid, self.status, self.counters = uid, RunState(), Counters()
        self.refused: list[PeerFault] = []
        self.inbox = Inbox(schemas, 1 << 22, self.status, self.counters, lambda _uid, _size: None)
        self.leases, self.folder, self.barrier = Leases(), folder, barrier
        self.memory = SharedMemoryPath(self._context(n, schemas))
        self.model_slots = ModelSlots(schemas[0], self.leases, self.memory, self.status, Counters())
        self.model = torch.zeros(schemas[0].elements)
        self.may_lose_doorbells = False
        """Whether the doorbell's queue may overflow: only if the test lets the owner break the protocol."""

    def _context(self, n: int, schemas: tuple[Schema, ...]) -> PathContext:
        def send_by_socket(*_: object) -> None:
            assert self.may_lose_doorbells, "the doorbell's queue is full"

        def unused(*_: object) -> None:
            raise AssertionError("shared memory must not need this part of a node")

        machine_of = dict.fromkeys(range(n), 0)
        return PathContext(
            uid=self.uid, machine_of=machine_of,
            config=ZeroMQConfig.model_validate({"name": "shared_memory"}), schemas=schemas,
            routing=Routing(machine_of, memory=True), partners=None, run_id=RUN, generation=FIRST, folder=self.folder,
            inbox=self.inbox, state=self.status, counters=self.counters, leases=self.leases,
            lease_of=lambda tensor: self.model_slots.lease(tensor), barrier=self.barrier or unused, gather=unused,  # type: ignore[arg-type]
            host_of=unused, send=send_by_socket, admit=lambda _message: None, refuse=self.refused.append,  # type: ignore[arg-type]
        )  # fmt: skip

    def send(self, round: int, uids: list[int], payload: Payload | None = None, phase: int = 0) -> list[int]:
        """Publishes a payload, or the model, without waiting. Returns the readers that were notified."""
        self.model_slots.sent_to = tuple(uids)
        return self.memory.publish(payload or Payload({"x": self.model}), uids, (round, phase), 0.0)

    def move_model(self) -> int | None:
        """Moves the model to another slot, as mixing does. Returns the slot, or None if the model is in ordinary
        memory."""
        destination = self.model_slots.acquire_slot(self.model, 0.0)
        assert destination is not None
        self.model = destination.copy_(self.model)
        slots = self.memory.model_slots
        return next((i for i, slot in enumerate(slots) if slot.data_ptr() == destination.data_ptr()), None)

    def receive_doorbells(self) -> None:
        assert self.memory._doorbell is not None
        for _ in range(SLOTS + 1):  # a call with time-out 0 takes one
            self.memory._doorbell.listen(0.0)

    def exchange(self, round: int, sources: tuple[int, ...] = (0,)) -> InboxExchange:
        return InboxExchange(self.inbox, (round, 0), sources, frozenset())


def open_nodes(n: int, schemas: tuple[Schema, ...], folder: Path) -> list[MemoryNode]:
    """Returns n nodes, each of which has mapped the publish buffers of all others."""
    nodes = [MemoryNode(uid, n, schemas, folder) for uid in range(n)]
    for node in nodes:
        node.memory.create_buffers({False: [uid for uid in range(n) if uid != node.uid]}, True)
    for node in nodes:
        node.memory.map_buffers()
    for node in nodes:
        node.memory.unlink_buffers()
        node.memory.finish_open()
    return nodes


def open_owner_and_reader(
    folder: Path, schemas: tuple[Schema, ...] = flat_schema(ELEMENTS)
) -> tuple[MemoryNode, MemoryNode]:
    owner, reader = open_nodes(2, schemas, folder)
    return owner, reader


def close_nodes(*nodes: MemoryNode) -> None:
    for node in nodes:
        node.memory.close(broken=False)
