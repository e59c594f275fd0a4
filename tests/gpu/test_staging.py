"""Staging through pinned memory of the host. None of this has run so far."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decentnode.communication.receive.chunking import TensorPlan
from decentnode.communication.receive.staging import CudaCopies, Staging
from decentnode.communication.zeromq.generations.generation_paths import GenerationPaths
from decentnode.payload import TensorSpec

pytestmark = pytest.mark.gpu
ELEMENTS = 32_000_000
SPEC = TensorSpec(torch.float32, ELEMENTS)
PLAN = TensorPlan("x", SPEC, 1 << 20)


def fetch_whole(staging: Staging, x: torch.Tensor) -> torch.Tensor:
    """Returns a GPU tensor as the staging copies it to the host, chunk by chunk."""
    fetched = staging.fetch(PLAN, x)
    assert fetched is not None
    parts = [fetched.piece(chunk) for chunk in range(PLAN.count(x.numel()))]
    return torch.cat([torch.frombuffer(part, dtype=torch.float32) for part in parts])


def test_tensors_are_fetched_and_uploaded_bit_for_bit() -> None:
    staging = Staging(CudaCopies(torch.device("cuda", 0)))
    staging.take([SPEC])
    for n in range(5):
        x = torch.randn(3_000_001, device="cuda").mul_(n + 1)  # the copies must wait for it
        expected = x.cpu()
        assert torch.equal(fetch_whole(staging, x), expected)
        y = staging.upload(expected)
        expected_again = expected.clone()
        expected.zero_()
        assert y.is_cuda and torch.equal(y.cpu(), expected_again)


def test_slots_for_sends_are_allocated_when_a_generation_first_needs_sockets() -> None:
    """The generation before had only neighbors in shared memory, so that it allocated slots for received models
    alone."""
    placement: Any = SimpleNamespace(upload=None)
    sender: Any = SimpleNamespace(staging=None)
    run: Any = SimpleNamespace(
        sender=sender, schemas=(SimpleNamespace(tensors={"x": SPEC}),),
        inbox=SimpleNamespace(device=torch.device("cuda", 0), state=SimpleNamespace(placement=placement)),
    )  # fmt: skip
    paths, x = GenerationPaths(run, None), torch.ones(3, device="cuda")  # type: ignore[arg-type]
    paths._allocate_pinned(outwards=False)
    assert placement.upload is not None and sender.staging.fetch(PLAN, x) is None
    paths._allocate_pinned(outwards=True)
    assert torch.equal(fetch_whole(sender.staging, x), x.cpu())
