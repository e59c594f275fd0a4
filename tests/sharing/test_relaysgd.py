"""Properties of relaysgd beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round
from tests.sharing.helpers import Quadratics


def test_relaysgd_computes_the_exact_mean_after_as_many_rounds_as_the_longest_path_has_nodes() -> None:
    """Each node's model is reset to its start before every round, so that the relayed sums are those of the starts."""
    graph, models = make("line", nodes=6), random_models(6, 7, torch.float64)
    start = [m.clone() for m in models]
    rules = [rule("relaysgd")() for _ in models]
    for r in range(6):
        for model, constant in zip(models, start, strict=True):
            model.copy_(constant)
        run_round(rules, models, graph, r, pull=0.0)
    for model in models:
        torch.testing.assert_close(model, torch.stack(start).mean(0))


@pytest.mark.slow
def test_relaysgd_finds_the_optimum_on_a_line_where_full_is_biased() -> None:
    """Relayed models are delayed by a round per hop, but all have the same weight."""
    line, quadratics, rounds = make("line", nodes=8), Quadratics(8), scale(1000, 6000)
    assert quadratics.error(rule("relaysgd"), line, rounds, 0.02) < 1e-5 < 1e-2 < quadratics.error(
        rule("full"), line, 600, 0.02
    )
