"""What lead promises beyond the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.graph.weights import MetropolisHastings, MetropolisHastingsConfig
from decentnode.sharing.base import Sharing
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.helpers import Quadratics, error_on_quadratics

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
COMPRESSORS: list[dict[str, Any]] = [
    {}, {"compression": {"name": "qsgd"}}, {"compression": {"name": "int8"}}, {"compression": None, "choose": "random"},
]  # fmt: skip


@pytest.mark.parametrize("options", COMPRESSORS)
def test_the_mean_moves_by_the_mean_update_whatever_is_sent(options: dict[str, Any]) -> None:
    """Also where nodes begin with different models, and send each other whole copies first."""
    models = random_models(6, 40, torch.float64)
    rules: list[Sharing] = set_up_rules(rule("lead", step_size=0.2, **options), models)
    for r in range(8):
        before = torch.stack(models)
        run_round(rules, models, make("ring", nodes=6), r, lr=0.5)
        moved = torch.stack([0.1 * (x - float(uid)) for uid, x in enumerate(before)]).mean(0)
        torch.testing.assert_close(torch.stack(models).mean(0), before.mean(0) - moved)
    corrections = torch.stack([each.correction for each in rules])  # type: ignore[attr-defined]
    assert float(corrections.sum(0).abs().max()) < 1e-12 < float(corrections.abs().max())


def test_it_converges_linearly_to_the_optimum_where_choco_stalls() -> None:
    ring, codec = make("ring", nodes=8), {"name": "int4", "unbiased": True}
    errors = [error_on_quadratics("lead", ring, rounds, 0.1, step_size=0.4) for rounds in (100, 200, 300)]
    assert errors[2] < 1e-3 * errors[1] < 1e-6 * errors[0] and errors[2] < 1e-8
    stalls = [error_on_quadratics("choco", ring, rounds, 0.1, choose="all", compression=codec, step_size=0.4)
              for rounds in (200, 300)]  # fmt: skip
    assert stalls[1] == pytest.approx(stalls[0], rel=0.1) and stalls[1] > 0.1


def test_where_all_is_sent_exactly_it_is_exact_diffusion_with_a_lazy_matrix() -> None:
    lazy = make("ring", nodes=16, weights=MetropolisHastings(MetropolisHastingsConfig(lazy=True)))
    found = Quadratics().error(rule("lead", compression=None, step_size=0.5), make("ring", nodes=16), 60, 0.05)
    assert found == pytest.approx(Quadratics().error(rule("d2"), lazy, 60, 0.05), rel=1e-9)


def test_a_correction_falls_with_the_learning_rate() -> None:
    """And rests where it is 0: otherwise it would drive models apart that are at the optimum."""
    curvature, target = torch.rand(8, 30).double() + 0.5, torch.randn(8, 30).double()
    best = (curvature * target).sum(0) / curvature.sum(0)
    models = [torch.zeros(30, dtype=torch.float64) for _ in range(8)]
    rules, worst = set_up_rules(rule("lead", step_size=0.4), models), []
    for r, lr in enumerate([0.2] * 300 + [0.02] * 20 + [0.0] * 20 + [0.02] * 20):
        run_round(rules, models, make("ring", nodes=8), r, lr=lr,
                  step=lambda u, x, lr=lr: x.sub_(curvature[u] * (x - target[u]), alpha=lr))  # type: ignore[misc]
        worst.append(float((torch.stack(models) - best).abs().max()))
    assert worst[299] < 1e-4 and max(worst[300:]) < 1.5 * worst[299]


@pytest.mark.parametrize(("settings", "says"), [
    (["graph={name: one_peer_exponential, nodes: 16}"], "lead needs a static graph"),
    (["node.schedule=overlapped"], "lead works with schedule: sequential only"),
    (["node.missing=return_weight"], "lead cannot recover from a missing payload"),
    (["sharing.choose=largest"], "choose must be"),
    (["sharing.compression={name: sign}"], "lead diverges with every step_size.*use a finer compression"),
    (["sharing={name: lead, choose: random, fraction: 0.05}"], "lead diverges with every step_size.*a larger fraction"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(QUICKSTART, ["sharing={name: lead}", *settings])
    load(QUICKSTART, ["sharing={name: lead, compression: {name: sign}, step_size: 0.001}"])
