"""What noloco promises beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.graph.contract import make
from tests.sharing.contract import draw, one_round, rule


@pytest.mark.parametrize("n", [5, 6])
def test_noloco_moves_the_mean_like_one_outer_optimizer(n: int) -> None:
    """Pairing does not matter to the mean: m <- b m + a mean(D), p <- p + m for the means of all."""
    models = draw(n, 4, torch.float64)
    rules = [rule("noloco", every=2, momentum=0.5, pull=0.7)() for _ in models]
    slow = torch.stack(models).mean(0)
    momentum = torch.zeros_like(slow)
    for r in range(8):
        one_round(rules, models, make("ring", nodes=n), r)
        if r % 2 == 0:
            grown = torch.stack(models)
            grown = grown - 0.1 * (grown - torch.arange(float(n), dtype=torch.float64)[:, None])
            continue
        momentum = 0.5 * momentum + 0.7 * (grown.mean(0) - slow)
        slow = slow + momentum
        torch.testing.assert_close(torch.stack(models).mean(0), slow)
