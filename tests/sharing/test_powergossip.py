"""Properties of powergossip beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round
from tests.sharing.helpers import distance_from_consensus


@pytest.mark.slow
def test_nodes_reach_consensus_on_matrices_and_keep_the_mean() -> None:
    models = random_models(8, 20 * 12 + 7, torch.float64)
    mean = torch.stack(models).mean(0)
    rules = [rule("powergossip", rank=1)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(20, 3, 4), (7,)])
        assert each.payload_schema(247, torch.float64)["products"].max_elements == 20
    graph = make("ring", nodes=8)
    for r in range(800):
        run_round(rules, models, graph, r, pull=0.0)
        if r == 5:
            torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-10, rtol=0)
    assert distance_from_consensus(models) < 1e-5


def test_powergossip_removes_a_difference_of_its_rank_in_few_rounds() -> None:
    """The models differ by a matrix of rank one. Half of it is gone after two exchanges: the second one uses the factor
    that the first one found."""
    u, v = random_models(2, 15, torch.float64)
    models = [torch.zeros(225, dtype=torch.float64), torch.outer(u, v).reshape(-1)]
    rules = [rule("powergossip", rank=1)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(15, 15)])
    for r in range(2):
        run_round(rules, models, make("ring", nodes=2), r, pull=0.0)
    assert distance_from_consensus(models) < 0.51
    for r in range(2, 40):
        run_round(rules, models, make("ring", nodes=2), r, pull=0.0)
    assert distance_from_consensus(models) < 1e-10


def test_powergossip_reaches_consensus_after_a_lost_payload() -> None:
    models = random_models(4, 100, torch.float64)
    rules = [rule("powergossip", rank=2)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(10, 10)])
    graph = make("ring", nodes=4)
    for r in range(120):
        run_round(rules, models, graph, r, pull=0.0, missing=frozenset({1}) if r == 7 else frozenset())
    assert distance_from_consensus(models) < 1e-4
