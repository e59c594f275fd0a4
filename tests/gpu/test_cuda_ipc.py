"""CUDA IPC: processes on one GPU read each other's memory. On a real one none of this has run so far."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from decentnode.communication.hybrid.transport import Hybrid
from decentnode.communication.shared_memory.path import SharedMemoryPath
from decentnode.mixing import mix_into
from decentnode.payload import Payload
from tests.gpu.pretended import needs_a_real_gpu
from tests.gpu.processes import HANGS_SECONDS, on_one_gpu
from tests.gpu.resnet import resnet18

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(HANGS_SECONDS + 30)]
ELEMENTS = 64_000_000


def exchange_and_check(node: Hybrid, device: torch.device) -> bool:
    """Exchanges 20 rounds with all others through CUDA IPC and checks every value."""
    others = tuple(uid for uid in range(len(node._run.machine_of)) if uid != node.uid)
    assert node.parts.routing.path(node.uid, others[0]) == "cuda_ipc"
    readers = node.parts.paths.of(SharedMemoryPath).readers
    assert readers == set(others), f"no CUDA IPC here: of node {node.uid}'s neighbors {[*readers]} read its memory"
    for r in range(20):
        x = torch.full((node.schemas[0].elements,), 100.0 * r + node.uid, device=device)
        exchange = node.exchange(r, dict.fromkeys(others, Payload({"x": x})), others)
        x.fill_(-1)
        (arrival,) = exchange.arrivals(60)  # all in one arrival, so that one launch mixes it
        assert not arrival.missing and (arrival.start, arrival.stop) == (0, x.numel())
        for uid, payload in arrival.received.items():
            received = payload.tensors["x"]
            assert received.device == device and bool((received == 100.0 * r + uid).all())
    return True


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("elements", [7, 3_000_001])
def test_models_arrive_bit_for_bit_round_after_round(n: int, elements: int) -> None:
    assert on_one_gpu(n, elements, exchange_and_check) == dict.fromkeys(range(n), True)


def exchange_without_ipc(node: Hybrid, device: torch.device) -> bool:
    """Exchanges three rounds through shared memory of the host, from and to pinned memory, and checks every value."""
    others = tuple(uid for uid in range(len(node._run.machine_of)) if uid != node.uid)
    assert node.parts.routing.path(node.uid, others[0]) == "cuda_ipc"
    assert not node.parts.paths.of(SharedMemoryPath).readers
    staging, upload = node._run.sender.staging, node._run.inbox.state.placement.upload
    assert staging is not None and staging._out and upload == staging.upload
    for r in range(3):
        x = torch.full((node.schemas[0].elements,), 100.0 * r + node.uid, device=device)
        for arrival in node.exchange(r, dict.fromkeys(others, Payload({"x": x})), others).arrivals(60):
            assert not arrival.missing
            for uid, payload in arrival.received.items():
                assert payload.tensors["x"].device == device and bool((payload.tensors["x"] == 100.0 * r + uid).all())
    return True


@pytest.mark.skipif("PRETENDED_CUDA" not in os.environ, reason="a real GPU's driver cannot be made to refuse CUDA IPC")
def test_models_pass_through_pinned_memory_where_cuda_ipc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETENDED_CUDA_IPC", "0")
    assert on_one_gpu(2, 3_000_001, exchange_without_ipc) == dict.fromkeys(range(2), True)


def mix_from_neighbors_memory(node: Hybrid, device: torch.device) -> bool:
    """Returns whether node 0 gets the mean of all models when it mixes directly from its neighbors' memory."""
    others = tuple(uid for uid in range(len(node._run.machine_of)) if uid != node.uid)
    n, x = 1 + len(others), torch.full((ELEMENTS,), float(node.uid), device=device)
    exchange = node.exchange(0, dict.fromkeys(others, Payload({"x": x})), others)
    for arrival in exchange.arrivals(60):
        assert not arrival.missing
    node.barrier("written", 60)  # no node overwrites its memory until all are done
    if node.uid:
        return True
    mapped = node.parts.paths.of(SharedMemoryPath)._buffer_readers
    assert mapped.keys() == set(others), f"no CUDA IPC here: of {others} only the memory of {[*mapped]} could be mapped"
    slots = [mapped[uid].slots[0][1][0] for uid in others]  # each has the whole first payload
    mixed = mix_into(x, x, 1 / n, [(tensor, 1 / n) for tensor in slots])
    return torch.allclose(mixed, torch.full_like(mixed, (n - 1) / 2))


@needs_a_real_gpu
@pytest.mark.parametrize("n", [2, 4])
def test_a_node_mixes_directly_from_its_neighbors_memory(n: int) -> None:
    assert on_one_gpu(n, ELEMENTS, mix_from_neighbors_memory) == dict.fromkeys(range(n), True)


BATCH, STEPS, NODES = 32, 5, 16


def train(node: Hybrid, device: torch.device) -> tuple[list[float], list[float]]:
    """Trains a ResNet-18 on images of CIFAR's shape for STEPS rounds of one step, with neighbors on a ring.

    Returns (sum, sum of squares) of the parameters, in float64, before and after the last mixing.
    """
    n = len(node._run.machine_of)
    neighbors = tuple(sorted({(node.uid + 1) % n, (node.uid - 1) % n}))
    torch.manual_seed(node.uid)
    model, flat = resnet18(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(0, 10, (BATCH,), device=device)
    before_and_after: list[list[float]] = []
    for r in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        before_and_after = [sums(flat)]
        payload = Payload({"x": flat})
        for arrival in node.exchange(r, dict.fromkeys(neighbors, payload), neighbors).arrivals(300):
            assert not arrival.missing
            part = flat[arrival.start : arrival.stop]
            weighted: list[Any] = [(p.tensors["x"], 1 / 3) for p in arrival.received.values()]
            mix_into(part, part, 1 / 3, weighted)
        before_and_after.append(sums(flat))
    return before_and_after[0], before_and_after[1]


def sums(flat: torch.Tensor) -> list[float]:
    wide = flat.double()
    return [float(wide.sum()), float(wide.square().sum())]


@needs_a_real_gpu
def test_sixteen_nodes_of_resnet18_train_on_one_gpu() -> None:
    """Mixing with doubly stochastic weights keeps the sum over nodes and makes the models' norms smaller."""
    elements = resnet18(torch.device("cpu"))[1].numel()
    results = on_one_gpu(NODES, elements, train).values()
    before, after = (torch.tensor([pair[which] for pair in results], dtype=torch.float64).sum(0) for which in (0, 1))
    # 3 * (1 / 3) in float32 is 1 + 3e-8, and a model's sum includes thousands of ones, of its norms
    assert bool(torch.isfinite(after).all()) and abs(float(after[0] - before[0])) < 1e-4 * float(before[1]) ** 0.5
    assert float(after[1]) < float(before[1])
