"""Processes on one GPU that read each other's memory. None of this has run so far."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from decentnode.communication.hybrid import Hybrid
from decentnode.mixing import mix_into, passes
from decentnode.payload import Payload
from tests.gpu.processes import on_one_gpu
from tests.gpu.resnet import resnet18
from tests.gpu.test_mixing import milliseconds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ELEMENTS = 64_000_000


def exchange_and_check(node: Hybrid, device: torch.device) -> bool:
    others = tuple(uid for uid in range(len(node._machine_of)) if uid != node.uid)
    assert node.edges.way(node.uid, others[0]) == "cuda_ipc" and node._memory.readers == set(others)
    for r in range(20):
        x = torch.full((node.schemas[0].elements,), 100.0 * r + node.uid, device=device)
        flying = node.exchange(r, dict.fromkeys(others, Payload({"x": x})), others)
        x.fill_(-1)
        for arrival in flying.arrivals(60):
            assert not arrival.missing
            for uid, payload in arrival.received.items():
                got = payload.tensors["x"]
                assert got.device == device and bool((got == 100.0 * r + uid).all())
    return True


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("elements", [7, 3_000_001])
def test_models_arrive_bit_for_bit_round_after_round(n: int, elements: int) -> None:
    assert on_one_gpu(n, elements, exchange_and_check) == dict.fromkeys(range(n), True)


def mix_speed(node: Hybrid, device: torch.device) -> tuple[float, float]:
    """(GB/s of a copy, GB/s of mixing all neighbors straight from their memory); node 0 alone measures."""
    others = tuple(uid for uid in range(len(node._machine_of)) if uid != node.uid)
    x = torch.ones(ELEMENTS, device=device)
    flying = node.exchange(0, dict.fromkeys(others, Payload({"x": x})), others)
    for arrival in flying.arrivals(60):
        assert not arrival.missing
    node.barrier("written", 60)  # from here on only node 0 uses the GPU
    if node.uid:
        return 0.0, 0.0
    boards = [node._memory._mapped[uid].slots[0][1][0] for uid in others]  # where the first payload went, whole
    y, weighted = torch.empty_like(x), [(tensor, 1 / (1 + len(others))) for tensor in boards]
    copy = 2 * 4e-6 * ELEMENTS / milliseconds(lambda: y.copy_(x))
    mixed = 4e-6 * ELEMENTS * passes(len(others), True) / milliseconds(lambda: mix_into(x, x, 0.5, weighted))
    return copy, mixed


@pytest.mark.parametrize("n", [2, 4])
def test_speed_of_mixing_from_the_neighbors_memory(n: int) -> None:
    copy, mixed = on_one_gpu(n, ELEMENTS, mix_speed)[0]
    print(f"\n{n} processes on {torch.cuda.get_device_name()}: copy {copy:.0f} GB/s, mixing straight from {n - 1} "
          f"neighbors' memory {mixed:.0f} GB/s ({mixed / copy:.2f} of it, asked >= 0.80)")  # fmt: skip


BATCH, STEPS, NODES = 32, 20, 16


def train(node: Hybrid, device: torch.device) -> float:
    """Seconds of STEPS rounds, one step each, of a ResNet-18 on images of CIFAR's shape; neighbors on a ring."""
    n = len(node._machine_of)
    neighbors = tuple(sorted({(node.uid + 1) % n, (node.uid - 1) % n} - {node.uid}))
    torch.manual_seed(node.uid)
    model, flat = resnet18(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = torch.randn(BATCH, 3, 32, 32, device=device), torch.randint(0, 10, (BATCH,), device=device)
    started = 0.0
    for r in range(STEPS + 3):
        if r == 3:
            node.barrier("warm", 300)
            started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if neighbors:
            payload = Payload({"x": flat})
            for arrival in node.exchange(r, dict.fromkeys(neighbors, payload), neighbors).arrivals(300):
                part = flat[arrival.start : arrival.stop]
                weighted: list[Any] = [(p.tensors["x"], 1 / 3) for p in arrival.received.values()]
                mix_into(part, part, 1 - len(weighted) / 3, weighted)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def test_sixteen_nodes_of_resnet18_beside_one_after_the_other() -> None:
    elements = resnet18(torch.device("cpu"))[1].numel()
    together = max(on_one_gpu(NODES, elements, train, 500).values())
    alone = on_one_gpu(1, elements, train)[0]
    print(f"\n{NODES} nodes of ResNet-18 ({elements / 1e6:.1f} M) at once on {torch.cuda.get_device_name()}: "
          f"{1e3 * together / STEPS:.0f} ms per round with gossip, {1e3 * NODES * alone / STEPS:.0f} ms one after the "
          f"other without ({NODES * alone / together:.2f} times as fast)")  # fmt: skip
