"""Pinned slots on a real GPU, beside torch's own copies. None of this has run so far."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from decentnode.communication.plan import TensorPlan, to_bytes
from decentnode.communication.staging import CudaCopies, Staging
from decentnode.payload import TensorSpec

pytestmark = pytest.mark.gpu
ELEMENTS = 32_000_000
SPEC = TensorSpec(torch.float32, ELEMENTS)
PLAN = TensorPlan("x", SPEC, 1 << 20)


def gigabytes_per_second(work: Callable[[], object]) -> float:
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 4e-9 * ELEMENTS / sorted(times[2:])[5]


def fetched_whole(made: Staging, x: torch.Tensor) -> torch.Tensor:
    fetched = made.fetch(PLAN, x)
    assert fetched is not None
    parts = [fetched.piece(chunk) for chunk in range(PLAN.count(x.numel()))]
    return torch.cat([torch.frombuffer(part, dtype=torch.float32) for part in parts])


def test_bytes_come_and_go_as_they_are() -> None:
    made = Staging(CudaCopies(torch.device("cuda", 0)), [SPEC])
    for n in range(5):
        x = torch.randn(3_000_001, device="cuda").mul_(n + 1)  # the copies come after it
        expected = x.cpu()
        assert torch.equal(fetched_whole(made, x), expected)
        y = made.lift(expected)
        expected_again = expected.clone()
        expected.zero_()
        assert y.is_cuda and torch.equal(y.cpu(), expected_again)


def test_speed_of_staging() -> None:
    made, x = Staging(CudaCopies(torch.device("cuda", 0)), [SPEC]), torch.randn(ELEMENTS, device="cuda")
    host, pinned = torch.empty(ELEMENTS), torch.empty(ELEMENTS, pin_memory=True)

    def fetch() -> None:
        fetched = made.fetch(PLAN, x)
        assert fetched is not None
        for chunk in range(PLAN.count(ELEMENTS)):
            fetched.piece(chunk)

    speeds = {
        "out, pinned slots": fetch, "out, pageable": lambda: to_bytes(x), "in, pinned slots": lambda: made.lift(host),
        "in, pageable": lambda: host.to("cuda"), "out, one pinned copy": lambda: pinned.copy_(x),
    }  # fmt: skip
    found = ", ".join(f"{name} {gigabytes_per_second(work):.1f} GB/s" for name, work in speeds.items())
    print(f"\n{4e-6 * ELEMENTS:.0f} MB on {torch.cuda.get_device_name()}: {found}")
