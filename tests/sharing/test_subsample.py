"""Properties of subsample beyond the contract."""

from __future__ import annotations

import torch

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules


def test_layerwise_subsample_draws_the_fraction_of_every_layer() -> None:
    subsample = rule("subsample", fraction=0.5, layerwise=True)()
    subsample.set_parameter_shapes([(10,), (4, 5), (1,)])
    at = subsample.chosen(31, 3, view(make("ring", nodes=4), 0, 0, 1))  # type: ignore[attr-defined]
    assert [int(((at >= a) & (at < b)).sum()) for a, b in ((0, 10), (10, 30), (30, 31))] == [5, 10, 1]


def test_whole_models_are_mixed_if_the_fraction_is_above_full_above() -> None:
    """As by the rule full. With a fraction equal to `full_above`, a part is sent."""
    ring = make("ring", nodes=4)
    whole, plain = random_models(4, 40, torch.float64), random_models(4, 40, torch.float64)
    for models, name, options in ((whole, "subsample", {"fraction": 0.5, "full_above": 0.4}), (plain, "full", {})):
        run_round(set_up_rules(rule(name, **options), models), models, ring, 0)
    torch.testing.assert_close(torch.stack(whole), torch.stack(plain), rtol=0, atol=1e-12)
    at = rule("subsample", fraction=0.4, full_above=0.4)().chosen(1000, 0, view(ring, 0, 0, 1))  # type: ignore[attr-defined]
    assert 300 < at.numel() < 500
