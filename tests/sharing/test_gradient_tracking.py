"""What gradient_tracking promises beyond the contract."""

from __future__ import annotations

import torch

from decentnode.sharing.base import Sharing
from tests.graph.contract import make
from tests.sharing.contract import draw, one_round, rule


def test_the_tracked_mean_is_the_mean_update() -> None:
    rules: list[Sharing] = [rule("gradient_tracking")() for _ in range(6)]
    models = draw(6, 9, torch.float64)
    for r in range(5):
        before = [m.clone() for m in models]
        one_round(rules, models, make("ring", nodes=6), r)
        updates = torch.stack([0.1 * (x - float(uid)) for uid, x in enumerate(before)])
        tracked = torch.stack([each.tracked for each in rules])  # type: ignore[attr-defined]
        torch.testing.assert_close(tracked.mean(0), updates.mean(0))
