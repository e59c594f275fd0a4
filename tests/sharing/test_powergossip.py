"""What powergossip promises beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.graph.contract import make
from tests.sharing.contract import draw, one_round, rule
from tests.sharing.helpers import spread


@pytest.mark.slow
def test_powergossip_agrees_on_matrices_and_keeps_the_mean() -> None:
    models = draw(8, 20 * 12 + 7, torch.float64)
    mean = torch.stack(models).mean(0)
    rules = [rule("powergossip", rank=1)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(20, 3, 4), (7,)])
        assert each.payload_schema(247, torch.float64)["products"].max_elements == 20
    graph = make("ring", nodes=8)
    for r in range(800):
        one_round(rules, models, graph, r, pull=0.0)
        if r == 5:
            torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-10, rtol=0)
    assert spread(models) < 1e-5


def test_powergossip_finds_a_difference_of_its_rank_at_once() -> None:
    u, v = draw(2, 15, torch.float64)
    models = [torch.zeros(225, dtype=torch.float64), torch.outer(u, v).reshape(-1)]
    rules = [rule("powergossip", rank=1)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(15, 15)])
    for r in range(2):
        one_round(rules, models, make("ring", nodes=2), r, pull=0.0)
    assert spread(models) < 0.51, "the second exchange uses the factor that the first one found"
    for r in range(2, 40):
        one_round(rules, models, make("ring", nodes=2), r, pull=0.0)
    assert spread(models) < 1e-10


def test_powergossip_begins_an_edge_anew_after_a_lost_message() -> None:
    models = draw(4, 100, torch.float64)
    rules = [rule("powergossip", rank=2)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(10, 10)])
    graph = make("ring", nodes=4)
    for r in range(120):
        one_round(rules, models, graph, r, pull=0.0, missing=frozenset({1}) if r == 7 else frozenset())
    assert spread(models) < 1e-4
