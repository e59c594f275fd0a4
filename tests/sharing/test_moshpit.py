"""Properties of moshpit beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round


@pytest.mark.parametrize(("n", "dimensions"), [(9, 2), (8, 3), (16, 2), (5, 1)])
def test_nodes_on_a_full_grid_have_the_mean_after_one_round_per_dimension(n: int, dimensions: int) -> None:
    models = random_models(n, 6, torch.float64)
    mean = torch.stack(models).mean(0)
    rules = [rule("moshpit", dimensions=dimensions)() for _ in models]
    for r in range(dimensions):
        run_round(rules, models, make("complete", nodes=n), r, pull=0.0)
    for model in models:
        torch.testing.assert_close(model, mean)
