"""Properties of beer beyond the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.sharing.base import Sharing
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.helpers import Quadratics, error_on_quadratics

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
COMPRESSORS: list[dict[str, Any]] = [
    {"fraction": 0.2}, {"fraction": 0.3, "choose": "random"}, {"choose": "all", "compression": {"name": "int4"}},
    {"choose": "all", "compression": {"name": "qsgd"}}, {"choose": "all", "compression": {"name": "sign"}},
]  # fmt: skip


@pytest.mark.parametrize("form", ["semi_atc", "dsgt"])
@pytest.mark.parametrize("options", COMPRESSORS)
def test_the_mean_of_the_trackers_is_the_mean_gradient_with_every_compressor(
    options: dict[str, Any], form: str
) -> None:
    """And the mean model descends along it, as if nothing were compressed."""
    models = random_models(6, 40, torch.float64)
    models = [models[0].clone() for _ in models]
    rules: list[Sharing] = set_up_rules(rule("beer", form=form, step_size=0.2, **options), models)
    for r in range(6):
        before = torch.stack(models)
        run_round(rules, models, make("ring", nodes=6), r, lr=0.5)
        updates = torch.stack([0.1 * (x - float(uid)) for uid, x in enumerate(before)])
        tracked = torch.stack([beer.tracked for beer in rules])  # type: ignore[attr-defined]
        torch.testing.assert_close(tracked.mean(0), updates.mean(0) / 0.5)
        torch.testing.assert_close(torch.stack(models).mean(0), before.mean(0) - updates.mean(0))


def test_beer_finds_the_optimum_on_unequal_data_where_choco_is_biased() -> None:
    ring, options = make("ring", nodes=8), {"fraction": 0.4, "step_size": 0.2}
    assert error_on_quadratics("beer", ring, 500, 0.05, **options) < 1e-4
    assert error_on_quadratics("choco", ring, 500, 0.05, **options) > 1


def test_uncompressed_beer_with_step_size_one_is_gradient_tracking() -> None:
    for form in ("semi_atc", "dsgt"):
        errors = [Quadratics().error(make_rule, make("ring", nodes=16), 50, 0.05) for make_rule in (
            rule("beer", form=form, choose="all", step_size=1.0), rule("gradient_tracking", form=form))]  # fmt: skip
        assert errors[0] == pytest.approx(errors[1], rel=1e-9)


@pytest.mark.parametrize(("form", "stable"), [("semi_atc", True), ("dsgt", False)])
def test_the_default_form_converges_with_a_learning_rate_at_which_the_papers_form_diverges(
    form: str, stable: bool
) -> None:
    make_rule = rule("beer", form=form, choose="all", compression={"name": "int4"}, step_size=1.0)
    error = Quadratics(8).error(make_rule, make("ring", nodes=8), 300, 0.5)
    assert (error < 1e-6) == stable


def test_rounding_errors_do_not_add_up_to_a_gradient() -> None:
    """Where nodes agree, they must be as small as their differences. Those of float16 that stayed in a sum of
    changes moved the mean of the models by 0.2 here."""
    draws = torch.Generator().manual_seed(1)
    curvature, target = torch.rand(6, 64, generator=draws) + 0.5, torch.randn(6, 64, generator=draws)
    models = [torch.zeros(64, dtype=torch.float16) for _ in range(6)]
    rules, means = set_up_rules(rule("beer", choose="all", step_size=0.4), models), []
    for r in range(500):
        def step(uid: int, x: torch.Tensor, trains: bool = r < 300) -> None:
            if trains:
                x.sub_((curvature[uid] * (x.float() - target[uid])).half(), alpha=0.1)

        run_round(rules, models, make("ring", nodes=6), r, step=step, lr=0.1)
        means.append(torch.stack(models).float().mean(0))
    assert float((means[-1] - means[300]).abs().mean()) < 0.05


def test_the_codecs_of_models_and_trackers_round_with_different_draws() -> None:
    """The model and the tracker are made equal here: with the same draws both would be coded to the same bytes."""
    (model,) = random_models(1, 400)
    make_rule = rule("beer", choose="all", compression={"name": "qsgd"})
    beer: Any = set_up_rules(make_rule, [model])[0]
    round_view = view(make("ring", nodes=4), 0, 0, 1)
    beer.begin(model, round_view)
    beer._copies["x"].public.zero_()
    beer.tracked.copy_(model)
    tensors = beer.outgoing(model, round_view)[1].tensors
    coded = [name.removeprefix("x.") for name in tensors if name.startswith("x.values")]
    assert any(not torch.equal(tensors[f"x.{name}"], tensors[f"v.{name}"]) for name in coded)


@pytest.mark.parametrize(("setting", "message"), [
    ("graph={name: one_peer_exponential, nodes: 16}", "beer needs a static graph"),
    ("node.schedule=overlapped", "beer works with schedule: sequential only"),
    ("node.missing=return_weight", "beer cannot recover from a missing payload"),
])  # fmt: skip
def test_unsupported_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(QUICKSTART, ["sharing={name: beer}", setting])
