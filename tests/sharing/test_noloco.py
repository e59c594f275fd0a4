"""Properties of noloco beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round


@pytest.mark.parametrize("n", [5, 6])
def test_noloco_moves_the_mean_as_one_outer_optimizer_would(n: int) -> None:
    """The random pairs do not change the mean over all nodes: m <- b m + a mean(D), p <- p + m, where D is what the
    local steps changed."""
    models = random_models(n, 4, torch.float64)
    rules = [rule("noloco", every=2, momentum=0.5, pull=0.7)() for _ in models]
    slow = torch.stack(models).mean(0)
    momentum = torch.zeros_like(slow)
    for r in range(8):
        run_round(rules, models, make("ring", nodes=n), r)
        if r % 2 == 0:
            targets = torch.arange(float(n), dtype=torch.float64)[:, None]
            before = torch.stack(models)
            stepped = before - 0.1 * (before - targets)  # the local step of the next round, which exchanges
            continue
        momentum = 0.5 * momentum + 0.7 * (stepped.mean(0) - slow)
        slow = slow + momentum
        torch.testing.assert_close(torch.stack(models).mean(0), slow)
