"""Ends of shared memory without sockets, as tests step them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

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


class End:
    """One node's end of shared memory, without sockets."""

    def __init__(
        self, uid: int, n: int, schemas: tuple[Schema, ...], folder: Path, barrier: Callable[..., object] | None = None
    ) -> None:
        self.uid, self.status, self.counters = uid, RunState(), Counters()
        self.refused: list[PeerFault] = []
        self.inbox = Inbox(schemas, 1 << 22, self.status, self.counters, lambda _uid, _size: None)
        self.leases, self.folder, self.barrier = Leases(), folder, barrier
        self.memory = SharedMemoryPath(self.context(n, schemas))
        self.model_slots = ModelSlots(schemas[0], self.leases, self.memory, self.status, Counters())
        self.model = torch.zeros(schemas[0].elements)
        self.breaks_rules = False

    def context(self, n: int, schemas: tuple[Schema, ...]) -> PathContext:
        def lose(*_: object) -> None:
            assert self.breaks_rules, "the doorbell's queue is full"

        def unused(*_: object) -> None:
            raise AssertionError("shared memory alone needs none of the others")

        machine_of = dict.fromkeys(range(n), 0)
        return PathContext(
            uid=self.uid, machine_of=machine_of,
            config=ZeroMQConfig.model_validate({"name": "shared_memory"}), schemas=schemas,
            routing=Routing(machine_of, memory=True), partners=None, run_id=RUN, generation=FIRST, folder=self.folder,
            inbox=self.inbox, state=self.status, counters=self.counters, leases=self.leases,
            lease_of=lambda tensor: self.model_slots.lease(tensor), barrier=self.barrier or unused, gather=unused,  # type: ignore[arg-type]
            host_of=unused, send=lose, admit=lambda _message: None, refuse=self.refused.append,  # type: ignore[arg-type]
        )  # fmt: skip

    def send(self, round: int, uids: list[int], payload: Payload | None = None, phase: int = 0) -> list[int]:
        """Without any patience; those that were told."""
        self.model_slots.sent_to = tuple(uids)
        return self.memory.publish(payload or Payload({"x": self.model}), uids, (round, phase), 0.0)

    def mix(self) -> int | None:
        """The model moves on, as after mixing; the slot that it lives in from now on."""
        place = self.model_slots.acquire_slot(self.model, 0.0)
        assert place is not None
        self.model = place.copy_(self.model)
        slots = self.memory.model_slots
        return next((i for i, slot in enumerate(slots) if slot.data_ptr() == place.data_ptr()), None)

    def hear(self) -> None:
        assert self.memory._doorbell is not None
        for _ in range(SLOTS + 1):  # without patience it takes in one at a time
            self.memory._doorbell.listen(0.0)

    def exchange(self, round: int, sources: tuple[int, ...] = (0,)) -> InboxExchange:
        return InboxExchange(self.inbox, (round, 0), sources, frozenset())

    def slots_of(self, uid: int) -> list[list[Tensor]]:
        return self.memory._buffer_readers[uid].slots[0]


def open_all(n: int, schemas: tuple[Schema, ...], folder: Path) -> list[End]:
    """Every node has the publish buffers of all others."""
    ends = [End(uid, n, schemas, folder) for uid in range(n)]
    for end in ends:
        end.memory.create_buffers({False: [uid for uid in range(n) if uid != end.uid]}, True)
    for end in ends:
        end.memory.map_buffers()
    for end in ends:
        end.memory.unlink_buffers()
        end.memory.finish_open()
    return ends


def owner_and_reader(folder: Path, schemas: tuple[Schema, ...] = flat_schema(ELEMENTS)) -> tuple[End, End]:
    owner, reader = open_all(2, schemas, folder)
    return owner, reader


def close(*ends: End) -> None:
    for end in ends:
        end.memory.close(broken=False)
