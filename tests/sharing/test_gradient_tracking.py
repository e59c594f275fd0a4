"""Properties of gradient_tracking beyond the contract."""

from __future__ import annotations

import torch

from decentnode.sharing.base import Sharing
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round


def test_the_mean_of_the_trackers_is_the_mean_local_update() -> None:
    rules: list[Sharing] = [rule("gradient_tracking")() for _ in range(6)]
    models = random_models(6, 9, torch.float64)
    for r in range(5):
        before = [m.clone() for m in models]
        run_round(rules, models, make("ring", nodes=6), r)
        updates = torch.stack([0.1 * (x - float(uid)) for uid, x in enumerate(before)])
        tracked = torch.stack([tracking.tracked for tracking in rules])  # type: ignore[attr-defined]
        torch.testing.assert_close(tracked.mean(0), updates.mean(0))
