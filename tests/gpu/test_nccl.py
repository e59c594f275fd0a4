"""NCCL with one node, which sends to itself through the code path of several GPUs.

None of this has run so far: it was written where there is no GPU. Several GPUs are beyond it in any case.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from decentnode.communication.base import AveragingGroup
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import RunState
from decentnode.communication.torch_distributed.batched_p2p import BatchedPath
from decentnode.communication.torch_distributed.clique_path import CLOSE_SECONDS, NodeSide
from decentnode.communication.torch_distributed.communicator import (
    ABORT_SECONDS,
    NcclCommunicator,
    describe_gpu,
    refusal,
)
from decentnode.communication.torch_distributed.gloo import connect, listen
from decentnode.communication.torch_distributed.group_collective import CollectiveKind, SumExchange
from decentnode.payload import Payload, TensorSpec
from tests.gpu.pretended import needs_a_real_gpu

pytestmark = pytest.mark.gpu
DENSE = Schema(3_000_000, {"x": TensorSpec(torch.float32, 3_000_000)}, True)
SPARSE = Schema(3_000_000, {"at": TensorSpec(torch.int32, 1000, False)}, False)


@pytest.fixture
def path() -> Iterator[BatchedPath]:
    """The batched path of a node that is its own neighbor."""
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    device, status, counters = torch.device("cuda", torch.cuda.current_device()), RunState(), Counters()
    inbox = Inbox((DENSE, SPARSE), 1 << 22, status, counters, lambda uid, size: None, device=device)
    server = listen("127.0.0.1", 30)
    communicator = NcclCommunicator(connect("127.0.0.1", server.port, "test/0", 30), 0, (0,), device, 30)
    made = BatchedPath(communicator, NodeSide(inbox, status, counters, 30.0, lambda tensor: None), peers=frozenset({0}),
                       start_seconds=30)  # fmt: skip
    yield made
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < CLOSE_SECONDS + ABORT_SECONDS + 5


def test_a_model_arrives_bit_for_bit_in_every_round(path: BatchedPath) -> None:
    x = torch.randn(DENSE.elements, device="cuda")
    for r in range(20):
        path._inbox.advance(r)
        sent = x.clone()
        path.begin((r, 0), [(Payload({"x": x}), [0])], [0])
        x.add_(1)  # on the same stream, after the copy
        received = torch.empty_like(x)
        for arrival in InboxExchange(path._inbox, (r, 0), (0,), frozenset({0})).arrivals(30):
            assert not arrival.missing
            received[arrival.start : arrival.stop] = arrival.received[0].tensors["x"]
        assert torch.equal(received, sent)


@needs_a_real_gpu
def test_an_exchange_that_hangs_ends_at_its_deadline_and_names_the_missing_node(path: BatchedPath) -> None:
    """The GPU is busy for seconds, which looks to the host like a peer that launches nothing. The fixture then
    closes."""
    path._inbox.advance(0)
    torch.cuda._sleep(10_000_000_000)  # cycles
    began = time.monotonic()
    path.begin((0, 0), [(Payload({"x": torch.zeros(DENSE.elements, device="cuda")}), [0])], [0])
    arrival = next(iter(InboxExchange(path._inbox, (0, 0), (0,), frozenset({0})).arrivals(1.0)))
    assert arrival.missing == {0} and not arrival.received and time.monotonic() - began < 3


def test_sparse_payloads_arrive_with_the_sizes_in_their_headers(path: BatchedPath) -> None:
    for r, size in enumerate((0, 1, 1000, 17)):
        path._inbox.advance(r)
        at = torch.arange(size, dtype=torch.int32, device="cuda")
        path.begin((r, 1), [(Payload({"at": at}, {"scale": r / 2}), [0])], [0])
        (arrival,) = InboxExchange(path._inbox, (r, 1), (0,), frozenset({0})).arrivals(30)
        assert torch.equal(arrival.received[0].tensors["at"], at) and arrival.received[0].scalars == {"scale": r / 2}


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_sum_collectives_of_one_node_return_its_model(path: BatchedPath, kind: CollectiveKind) -> None:
    for r in range(5):
        path._inbox.advance(r)
        payload = Payload({"x": torch.randn(DENSE.elements, device="cuda")})
        path.begin_collective(kind, (r, 0), AveragingGroup((0,), payload), {0: payload})
        received = torch.cat([arrival.total for arrival in SumExchange(path._inbox, (r, 0), (0,)).arrivals(30)])  # type: ignore[misc]
        assert torch.equal(received, payload.tensors["x"])


def test_all_gather_of_one_node_returns_its_model(path: BatchedPath) -> None:
    payload = Payload({"x": torch.randn(DENSE.elements, device="cuda")})
    path.begin_collective("all_gather", (0, 0), AveragingGroup((0,)), {0: payload})
    parts = [a.received[0].tensors["x"] for a in InboxExchange(path._inbox, (0, 0), (0,), frozenset({0})).arrivals(30)]
    assert torch.equal(torch.cat(parts), payload.tensors["x"])


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_two_nodes_on_one_gpu_are_refused() -> None:
    own = describe_gpu(torch.device("cuda", 0))
    assert refusal({0: own}) == "" and "nodes 0 and 1 share" in refusal({0: own, 1: own})
