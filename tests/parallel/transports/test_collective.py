"""How the transport `collective` waits for torch's operations."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decentnode.parallel.transports import collective
from decentnode.parallel.transports.base import Flight
from decentnode.parallel.transports.host_memory import HostMemory


@pytest.mark.parametrize(("backend", "arguments"), [("nccl", ()), ("gloo", (timedelta(seconds=7),))])
def test_the_gpu_and_not_the_host_waits_for_nccl(
    monkeypatch: pytest.MonkeyPatch, backend: str, arguments: tuple[object, ...]
) -> None:
    """The backend is that of the bucket's device: a process group may have one for each device, and no common name."""
    monkeypatch.setattr(collective, "backend_of", {torch.device("cpu"): backend}.__getitem__)
    exchange = object.__new__(collective.CollectiveExchange)
    exchange.rank, exchange.timeout_seconds, exchange.wait_seconds, exchange._host = 0, 7.0, 0.0, HostMemory()
    waits: list[tuple[object, ...]] = []
    bucket: Any = SimpleNamespace(flat=torch.zeros(1))
    exchange._await(Flight(bucket, 0, [(SimpleNamespace(wait=lambda *given: waits.append(given)), [1])]))
    assert waits == [arguments]
