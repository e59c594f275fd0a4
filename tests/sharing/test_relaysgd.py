"""What relaysgd promises beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import draw, one_round, rule
from tests.sharing.helpers import Quadratics


def test_relays_are_exact_after_the_tree_s_width() -> None:
    graph, models = make("line", nodes=6), draw(6, 7, torch.float64)
    start = [m.clone() for m in models]
    rules = [rule("relaysgd")() for _ in models]
    for r in range(6):
        for model, constant in zip(models, start, strict=True):
            model.copy_(constant)
        one_round(rules, models, graph, r, pull=0.0)
    for model in models:
        torch.testing.assert_close(model, torch.stack(start).mean(0))


@pytest.mark.slow
def test_relays_are_exact_on_a_line() -> None:
    """Delayed by hops but not biased, where gossip on the same line and step is."""
    line, quadratics, rounds = make("line", nodes=8), Quadratics(8), scale(1000, 6000)
    assert quadratics.error(rule("relaysgd"), line, rounds, 0.02) < 1e-5 < 1e-2 < quadratics.error(
        rule("full"), line, 600, 0.02
    )
