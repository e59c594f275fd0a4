"""Properties of full beyond the contract."""

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
def test_full_multiplies_the_models_by_the_mixing_matrix(family: str) -> None:
    graph = make(family, nodes=8)
    models = contract.random_models(8, 30)
    expected = contract.matrix_reference(graph, models, 5)
    contract.run_rounds(contract.RULES["full"], graph, models, 5)
    np.testing.assert_allclose(torch.stack(models).numpy(), expected, atol=1e-6)


def test_a_node_on_a_complete_graph_of_three_takes_the_mean() -> None:
    model = torch.tensor([3.0, 0.0])
    round_view = view(make("complete", nodes=3), 1, 0)
    Full(Full.Config()).mix(
        model, {0: Payload({"x": torch.tensor([0.0, 3.0])}), 2: Payload({"x": torch.tensor([3.0, 6.0])})}, round_view
    )
    torch.testing.assert_close(model, torch.tensor([2.0, 3.0]))


def test_all_neighbors_get_the_same_payload_object_so_that_it_is_encoded_once() -> None:
    outgoing = Full(Full.Config()).outgoing(torch.ones(3), view(make("star", nodes=5), 0, 0))
    assert len({id(payload) for payload in outgoing.values()}) == 1
