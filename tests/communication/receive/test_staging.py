"""Slots between a device and the host, with pageable memory and copies that happen when they are waited for."""

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
from tests.communication.contract import flat_schema, nodes, ring, together


class Late(Mark):
    """A copy in a queue: nothing happens before somebody waits, then everything up to it does."""

    def __init__(self, queue: list[Late], out: Tensor, source: Tensor) -> None:
        self._queue, self._out, self._source, self.over = queue, out, source, False
        queue.append(self)

    def wait(self) -> None:
        while not self.over:
            first = self._queue.pop(0)
            first._out.copy_(first._source)
            first.over = True


class Pageable(Copies):
    def __init__(self) -> None:
        self.taken, self.out, self.into = 0, list[Late](), list[Late]()

    def host(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.taken += 1
        return torch.empty(elements, dtype=dtype)

    def fetch(self, out: Tensor, source: Tensor) -> Mark:
        return Late(self.out, out, source)

    def blank(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.full((elements,), -1, dtype=dtype)

    def upload(self, out: Tensor, source: Tensor) -> Mark:
        return Late(self.into, out, source)


SPEC = TensorSpec(torch.float32, 10)
PLAN = TensorPlan("x", SPEC, 4)


def for_sending(copies: Pageable, specs: Sequence[TensorSpec]) -> Staging:
    made = Staging(copies)
    made.take(specs)
    return made


def floats(raw: memoryview) -> list[float]:
    return torch.frombuffer(raw, dtype=torch.float32).tolist()


def test_pieces_leave_one_by_one_and_only_as_far_as_they_were_waited_for() -> None:
    copies = Pageable()
    made = for_sending(copies, [SPEC])
    fetched = made.fetch(PLAN, torch.arange(10.0))
    assert fetched is not None and len(copies.out) == 3
    assert floats(fetched.piece(0)) == [0, 1, 2, 3] and len(copies.out) == 2
    assert floats(fetched.piece(2)) == [8, 9] and not copies.out
    assert floats(fetched.piece(1)) == [4, 5, 6, 7]


def test_a_slot_is_taken_again_when_its_last_lease_is_dropped() -> None:
    copies = Pageable()
    made = for_sending(copies, [SPEC, SPEC])
    taken = copies.taken
    held = [made.fetch(PLAN, torch.full((10,), float(n))) for n in range(OUT_SLOTS)]
    assert made.fetch(PLAN, torch.zeros(10)) is None
    lease = held[0].lease  # type: ignore[union-attr]
    first = held[0].piece(0)  # type: ignore[union-attr]
    held[0] = None
    assert made.fetch(PLAN, torch.zeros(10)) is None, "a message still holds the lease"
    assert floats(first) == [0, 0, 0, 0]
    del lease
    again = made.fetch(PLAN, torch.full((10,), 7.0))
    assert again is not None and floats(again.piece(0)) == [7] * 4
    assert copies.taken == taken == OUT_SLOTS + IN_SLOTS, "memory is taken once, before the first payload"
    assert floats(held[1].piece(1)) == [1] * 4  # type: ignore[union-attr]


def test_slots_for_what_leaves_are_taken_when_a_generation_first_needs_them() -> None:
    """The generation before had neighbors in shared memory alone."""
    copies = Pageable()
    made = Staging(copies)
    assert made.fetch(PLAN, torch.ones(10)) is None and copies.taken == IN_SLOTS
    for _ in range(2):
        made.take([SPEC])
        fetched = made.fetch(PLAN, torch.ones(10))
        assert fetched is not None and copies.taken == OUT_SLOTS + IN_SLOTS


def test_shorter_payloads_and_empty_ones() -> None:
    made = for_sending(Pageable(), [TensorSpec(torch.int32, 10, False)])
    plan = TensorPlan("at", TensorSpec(torch.int32, 10, False), 4)
    fetched = made.fetch(plan, torch.tensor([5, 6], dtype=torch.int32))
    assert fetched is not None and torch.frombuffer(fetched.piece(0), dtype=torch.int32).tolist() == [5, 6]
    empty = made.fetch(plan, torch.empty(0, dtype=torch.int32))
    assert empty is not None and empty.piece(0).nbytes == 0


@pytest.mark.parametrize("elements", [0, 1, 100, 20_001])
def test_what_is_lifted_may_change_at_once(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "IN_BYTES", 16_384)
    copies = Pageable()
    made = Staging(copies)
    lifted = []
    for n in range(3 * IN_SLOTS):
        source = torch.full((elements,), float(n))
        lifted.append(made.upload(source))
        source.fill_(-5)
        assert len(copies.into) <= IN_SLOTS
    for late in list(copies.into):
        late.wait()
    assert all(bool((tensor == n).all()) and tensor.numel() == elements for n, tensor in enumerate(lifted))


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_run_through_slots_sends_what_it_would_send_without(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks leave from the slots themselves; while both are held by messages payloads are copied whole."""
    elements, n = 300_000, 3
    schema = flat_schema(elements)
    used: list[bool] = []

    def fetched(node: Sender, plan: TensorPlan, tensor: Tensor) -> object:
        made = stagings[node._maker.uid].fetch(plan, tensor)
        used.append(made is not None)
        if made is None:
            node._port.request_acks()
        return made

    stagings = [for_sending(Pageable(), list(schema[0].tensors.values())) for _ in range(n)]
    monkeypatch.setattr(Sender, "_fetched", fetched)
    with nodes(transport, n, schema, chunk_bytes=1 << 20) as made:

        def run(node: Communication) -> None:
            others = ring(n)[node.uid]
            for r in range(12):
                x = torch.full((elements,), 10.0 * r + node.uid)
                flying = node.exchange(r, dict.fromkeys(others, Payload({"x": x})), others)
                x.fill_(-1)
                for arrival in flying.arrivals(60):
                    for uid, payload in arrival.received.items():
                        assert bool((payload.tensors["x"] == 10.0 * r + uid).all())

        together(made, run)
    assert used.count(True) >= n * OUT_SLOTS
