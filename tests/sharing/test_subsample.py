"""What subsample promises beyond the contract."""

from __future__ import annotations

import torch

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, one_round, rule


def test_subsample_draws_layers_apart() -> None:
    each = rule("subsample", fraction=0.5, layerwise=True)()
    each.set_parameter_shapes([(10,), (4, 5), (1,)])
    at = each.chosen(31, 3, view(make("ring", nodes=4), 0, 0, 1))  # type: ignore[attr-defined]
    assert [int(((at >= a) & (at < b)).sum()) for a, b in ((0, 10), (10, 30), (30, 31))] == [5, 10, 1]


def test_above_the_cap_whole_models_are_sent_and_averaged() -> None:
    """As the rule full does it; at the cap itself a part is."""
    ring = make("ring", nodes=4)
    whole, plain = draw(4, 40, torch.float64), draw(4, 40, torch.float64)
    for models, name, options in ((whole, "subsample", {"fraction": 0.5, "full_above": 0.4}), (plain, "full", {})):
        one_round(bound(rule(name, **options), models), models, ring, 0)
    torch.testing.assert_close(torch.stack(whole), torch.stack(plain), rtol=0, atol=1e-12)
    at = rule("subsample", fraction=0.4, full_above=0.4)().chosen(1000, 0, view(ring, 0, 0, 1))  # type: ignore[attr-defined]
    assert 300 < at.numel() < 500
