"""Models on a GPU over every transport: sent from the GPU, and back on it before they are mixed.

None of this has run so far.
"""

from __future__ import annotations

import pytest
import torch

from decentnode.communication.base import Communication
from decentnode.payload import Payload
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import flat_schema, open_nodes, run_on_all

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transport", ["shared_memory", "ipc", "tcp"])
@pytest.mark.parametrize("elements", [7, 2 * BLOCK_ELEMENTS + 13])
def test_received_payloads_lie_on_the_gpu(transport: str, elements: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with open_nodes(transport, 2, flat_schema(elements), device=device) as made:

        def run(node: Communication) -> None:
            other = 1 - node.uid
            for r in range(3):
                x = torch.full((elements,), 10.0 * r + node.uid, device=device)
                exchange = node.exchange(r, {other: Payload({"x": x})}, (other,))
                x.fill_(-1)
                for arrival in exchange.arrivals(20):
                    received = arrival.received[other].tensors["x"]
                    assert received.device == device and bool((received == 10.0 * r + other).all())

        run_on_all(made, run)


def test_gloo_exchanges_models_on_gpus_through_host_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with open_nodes("collective", 2, flat_schema(1000), device=device, backend="gloo") as made:

        def run(node: Communication) -> None:
            x = torch.full((1000,), float(node.uid), device=device)
            (arrival,) = node.exchange(0, {1 - node.uid: Payload({"x": x})}, (1 - node.uid,)).arrivals(20)
            received = arrival.received[1 - node.uid].tensors["x"]
            assert received.device == device and bool((received == 1 - node.uid).all())

        run_on_all(made, run)


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_the_mean_of_tensors_on_a_gpu_lies_on_the_gpu(transport: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with open_nodes(transport, 2, flat_schema(3), device=device) as made:
        pending_means = [node.mean("k", torch.full((2, 3), float(node.uid), device=device)) for node in made]
        for pending in pending_means:
            mean, contributors = pending.wait(20)
            assert contributors == 2 and mean.device == device and bool((mean == 0.5).all()) and mean.shape == (2, 3)
