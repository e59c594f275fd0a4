from __future__ import annotations

import numpy as np
import pytest
import torch

from decentnode.graph.base import view
from decentnode.payload import Payload
from decentnode.sharing.full import Full
from tests.graph.contract import make
from tests.sharing import contract


@pytest.mark.parametrize("family", ["ring", "regular", "one_peer_exponential", "exponential", "base_k_plus_1"])
def test_full_is_multiplication_by_w(family: str) -> None:
    graph = make(family, nodes=8)
    models = contract.draw(8, 30)
    expected = contract.matrix_reference(graph, models, 5)
    contract.gossip(contract.RULES["full"], graph, models, 5)
    np.testing.assert_allclose(torch.stack(models).numpy(), expected, atol=1e-6)


def test_three_lines_of_arithmetic() -> None:
    model = torch.tensor([3.0, 0.0])
    seen = view(make("complete", nodes=3), 1, 0)
    Full(Full.Config()).mix(
        model, {0: Payload({"x": torch.tensor([0.0, 3.0])}), 2: Payload({"x": torch.tensor([3.0, 6.0])})}, seen
    )
    torch.testing.assert_close(model, torch.tensor([2.0, 3.0]))


def test_one_payload_for_all_is_encoded_once() -> None:
    outgoing = Full(Full.Config()).outgoing(torch.ones(3), view(make("star", nodes=5), 0, 0))
    assert len({id(payload) for payload in outgoing.values()}) == 1
