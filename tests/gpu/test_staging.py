"""Pinned slots on a real GPU. None of this has run so far."""

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


def fetched_whole(made: Staging, x: torch.Tensor) -> torch.Tensor:
    fetched = made.fetch(PLAN, x)
    assert fetched is not None
    parts = [fetched.piece(chunk) for chunk in range(PLAN.count(x.numel()))]
    return torch.cat([torch.frombuffer(part, dtype=torch.float32) for part in parts])


def test_bytes_come_and_go_as_they_are() -> None:
    made = Staging(CudaCopies(torch.device("cuda", 0)))
    made.take([SPEC])
    for n in range(5):
        x = torch.randn(3_000_001, device="cuda").mul_(n + 1)  # the copies come after it
        expected = x.cpu()
        assert torch.equal(fetched_whole(made, x), expected)
        y = made.upload(expected)
        expected_again = expected.clone()
        expected.zero_()
        assert y.is_cuda and torch.equal(y.cpu(), expected_again)


def test_a_generation_that_first_uses_sockets_takes_slots_for_what_leaves() -> None:
    """The one before it had neighbors in shared memory alone: its slots are for what arrives."""
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
    assert torch.equal(fetched_whole(sender.staging, x), x.cpu())
