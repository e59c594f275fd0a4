"""Properties of elastic beyond the contract."""

from __future__ import annotations

import numpy as np
import torch

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.helpers import CURVATURE, START, TARGET, N, all_gradients, models_after_rounds


def test_elastic_keeps_the_sum_of_models_and_centers() -> None:
    models = random_models(6, 8, torch.float64)
    rules = [rule("elastic", every=1, pull=0.3)() for _ in models]
    for each, model in zip(rules, models, strict=True):
        each.begin(model, view(make("ring", nodes=6), 0, 0))
    total = 2 * torch.stack(models).sum(0)
    for r in range(40):
        run_round(rules, models, make("ring", nodes=6), r, pull=0.0)
        centers = torch.stack([each.center for each in rules])  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.stack(models).sum(0) + centers.sum(0), total)
    assert float(torch.stack(models).std(0).max()) < 1e-2


def test_elastic_on_a_complete_graph_is_easgd() -> None:
    """Equations 5 and 6 of the paper with one center, alpha = .05 and beta = n alpha, round by round. The form
    `force: after`, whose forces act on the models after the local steps, ends elsewhere."""
    graph, a, b, lr = make("complete", nodes=N), 0.05, 0.4, 0.2
    models = [torch.from_numpy(x.copy()) for x in START]
    rules = set_up_rules(rule("elastic", pull=a, center_pull=b), models)
    x, c = START.copy(), START[0].copy()
    h, t = torch.from_numpy(CURVATURE), torch.from_numpy(TARGET)
    for r in range(30):
        run_round(rules, models, graph, r, step=lambda u, m: m.sub_(h[u] * (m - t[u]), alpha=lr), lr=lr)
        x, c = x - lr * all_gradients(x) - a * (x - c), (1 - b) * c + b * x.mean(0)
        np.testing.assert_allclose(torch.stack(models).numpy(), x, atol=1e-12, rtol=0)
        for each in rules:
            np.testing.assert_allclose(each.center.numpy(), c, atol=1e-12, rtol=0)  # type: ignore[attr-defined]
    after = models_after_rounds({"name": "elastic", "pull": a, "center_pull": b, "force": "after"}, graph, [lr] * 30)
    assert np.abs(after - x).max() > 1e-3
