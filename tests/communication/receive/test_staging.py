"""Staging slots between a device and the host, with copies that happen only when they are waited for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decentnode.communication.base import Communication
from decentnode.communication.receive import staging
from decentnode.communication.receive.chunking import TensorPlan
from decentnode.communication.receive.staging import IN_SLOTS, OUT_SLOTS, Copies, Mark, Staging
from decentnode.communication.zeromq.protocol.sender import Sender
from decentnode.payload import Payload, TensorSpec
from tests.communication.contract import flat_schema, open_nodes, ring, run_on_all


class DeferredCopy(Mark):
    """A queued copy: a wait for it makes it and all copies queued before it."""

    def __init__(self, queue: list[DeferredCopy], out: Tensor, source: Tensor) -> None:
        self._queue, self._out, self._source, self._done = queue, out, source, False
        queue.append(self)

    def wait(self) -> None:
        while not self._done:
            first = self._queue.pop(0)
            first._out.copy_(first._source)
            first._done = True


class DeferredCopies(Copies):
    """Copies in ordinary memory; `out` and `into` are the queues of copies to the host and to the device."""

    def __init__(self) -> None:
        self.num_allocated, self.out, self.into = 0, list[DeferredCopy](), list[DeferredCopy]()

    def host(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.num_allocated += 1
        return torch.empty(elements, dtype=dtype)

    def fetch(self, out: Tensor, source: Tensor) -> Mark:
        return DeferredCopy(self.out, out, source)

    def blank(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.full((elements,), -1, dtype=dtype)

    def upload(self, out: Tensor, source: Tensor) -> Mark:
        return DeferredCopy(self.into, out, source)


SPEC = TensorSpec(torch.float32, 10)
PLAN = TensorPlan("x", SPEC, 4)


def make_staging(copies: DeferredCopies, specs: Sequence[TensorSpec]) -> Staging:
    """Returns a staging area with slots for sending payloads of these tensors."""
    staging_slots = Staging(copies)
    staging_slots.take(specs)
    return staging_slots


def floats(raw: memoryview) -> list[float]:
    return torch.frombuffer(raw, dtype=torch.float32).tolist()


def test_a_piece_is_copied_when_it_is_needed_and_later_pieces_are_not() -> None:
    copies = DeferredCopies()
    slots = make_staging(copies, [SPEC])
    fetched = slots.fetch(PLAN, torch.arange(10.0))
    assert fetched is not None and len(copies.out) == 3
    assert floats(fetched.piece(0)) == [0, 1, 2, 3] and len(copies.out) == 2
    assert floats(fetched.piece(2)) == [8, 9] and not copies.out
    assert floats(fetched.piece(1)) == [4, 5, 6, 7]


def test_a_slot_is_reused_when_its_last_lease_is_dropped() -> None:
    copies = DeferredCopies()
    slots = make_staging(copies, [SPEC, SPEC])
    num_allocated = copies.num_allocated
    held = [slots.fetch(PLAN, torch.full((10,), float(n))) for n in range(OUT_SLOTS)]
    assert slots.fetch(PLAN, torch.zeros(10)) is None
    lease = held[0].lease  # type: ignore[union-attr]
    first = held[0].piece(0)  # type: ignore[union-attr]
    held[0] = None
    assert slots.fetch(PLAN, torch.zeros(10)) is None, "a message still holds the lease"
    assert floats(first) == [0, 0, 0, 0]
    del lease
    again = slots.fetch(PLAN, torch.full((10,), 7.0))
    assert again is not None and floats(again.piece(0)) == [7] * 4
    assert copies.num_allocated == num_allocated == OUT_SLOTS + IN_SLOTS, "memory was allocated after the start"
    assert floats(held[1].piece(1)) == [1] * 4  # type: ignore[union-attr]


def test_slots_for_sending_are_allocated_when_a_generation_first_needs_them() -> None:
    """In the previous generation all neighbors were reached through shared memory."""
    copies = DeferredCopies()
    slots = Staging(copies)
    assert slots.fetch(PLAN, torch.ones(10)) is None and copies.num_allocated == IN_SLOTS
    for _ in range(2):
        slots.take([SPEC])
        fetched = slots.fetch(PLAN, torch.ones(10))
        assert fetched is not None and copies.num_allocated == OUT_SLOTS + IN_SLOTS


def test_payloads_shorter_than_the_slot_and_empty_ones_are_fetched() -> None:
    slots = make_staging(DeferredCopies(), [TensorSpec(torch.int32, 10, False)])
    plan = TensorPlan("at", TensorSpec(torch.int32, 10, False), 4)
    fetched = slots.fetch(plan, torch.tensor([5, 6], dtype=torch.int32))
    assert fetched is not None and torch.frombuffer(fetched.piece(0), dtype=torch.int32).tolist() == [5, 6]
    empty = slots.fetch(plan, torch.empty(0, dtype=torch.int32))
    assert empty is not None and empty.piece(0).nbytes == 0


@pytest.mark.parametrize("elements", [0, 1, 100, 20_001])
def test_a_tensor_may_change_as_soon_as_upload_returns(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "IN_BYTES", 16_384)
    copies = DeferredCopies()
    slots = Staging(copies)
    uploaded = []
    for n in range(3 * IN_SLOTS):
        source = torch.full((elements,), float(n))
        uploaded.append(slots.upload(source))
        source.fill_(-5)
        assert len(copies.into) <= IN_SLOTS
    for copy in list(copies.into):
        copy.wait()
    assert all(bool((tensor == n).all()) and tensor.numel() == elements for n, tensor in enumerate(uploaded))


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_payloads_sent_through_staging_slots_arrive_unchanged(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are sent from the slots themselves. While messages hold both slots, payloads are copied as a whole."""
    elements, n = 300_000, 3
    schema = flat_schema(elements)
    used: list[bool] = []

    def fetch_from_slots(node: Sender, plan: TensorPlan, tensor: Tensor) -> object:
        slot = stagings[node._maker.uid].fetch(plan, tensor)
        used.append(slot is not None)
        if slot is None:
            node._port.request_acks()
        return slot

    stagings = [make_staging(DeferredCopies(), list(schema[0].tensors.values())) for _ in range(n)]
    monkeypatch.setattr(Sender, "_fetched", fetch_from_slots)
    with open_nodes(transport, n, schema, chunk_bytes=1 << 20) as nodes:

        def run(node: Communication) -> None:
            others = ring(n)[node.uid]
            for r in range(12):
                x = torch.full((elements,), 10.0 * r + node.uid)
                exchange = node.exchange(r, dict.fromkeys(others, Payload({"x": x})), others)
                x.fill_(-1)
                for arrival in exchange.arrivals(60):
                    assert set(arrival.received) == set(others)
                    for uid, payload in arrival.received.items():
                        assert bool((payload.tensors["x"] == 10.0 * r + uid).all())

        run_on_all(nodes, run)
    assert used.count(True) >= n * OUT_SLOTS
