"""What beer promises beyond the contract."""

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
from tests.sharing.contract import bound, draw, one_round, rule
from tests.sharing.helpers import Quadratics, quadratics

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
CODECS: list[dict[str, Any]] = [
    {"fraction": 0.2}, {"fraction": 0.3, "choose": "random"}, {"choose": "all", "compression": {"name": "int4"}},
    {"choose": "all", "compression": {"name": "qsgd"}}, {"choose": "all", "compression": {"name": "sign"}},
]  # fmt: skip


@pytest.mark.parametrize("form", ["semi_atc", "dsgt"])
@pytest.mark.parametrize("options", CODECS)
def test_the_tracked_mean_is_the_mean_gradient_whatever_is_sent(options: dict[str, Any], form: str) -> None:
    """And the mean model descends along it, as if nothing were compressed."""
    models = draw(6, 40, torch.float64)
    models = [models[0].clone() for _ in models]
    rules: list[Sharing] = bound(rule("beer", form=form, step_size=0.2, **options), models)
    for r in range(6):
        before = torch.stack(models)
        one_round(rules, models, make("ring", nodes=6), r, lr=0.5)
        updates = torch.stack([0.1 * (x - float(uid)) for uid, x in enumerate(before)])
        tracked = torch.stack([each.tracked for each in rules])  # type: ignore[attr-defined]
        torch.testing.assert_close(tracked.mean(0), updates.mean(0) / 0.5)
        torch.testing.assert_close(torch.stack(models).mean(0), before.mean(0) - updates.mean(0))


def test_it_is_exact_on_unequal_data_where_choco_has_a_bias() -> None:
    ring, options = make("ring", nodes=8), {"fraction": 0.4, "step_size": 0.2}
    assert quadratics("beer", ring, 500, 0.05, **options) < 1e-4
    assert quadratics("choco", ring, 500, 0.05, **options) > 1


def test_where_all_is_sent_it_is_gradient_tracking() -> None:
    for form in ("semi_atc", "dsgt"):
        errors = [Quadratics().error(make_rule, make("ring", nodes=16), 50, 0.05) for make_rule in (
            rule("beer", form=form, choose="all", step_size=1.0), rule("gradient_tracking", form=form))]  # fmt: skip
        assert errors[0] == pytest.approx(errors[1], rel=1e-9)


@pytest.mark.parametrize(("form", "stable"), [("semi_atc", True), ("dsgt", False)])
def test_the_default_form_bears_steps_that_the_paper_s_does_not(form: str, stable: bool) -> None:
    make_rule = rule("beer", form=form, choose="all", compression={"name": "int4"}, step_size=1.0)
    error = Quadratics(8).error(make_rule, make("ring", nodes=8), 300, 0.5)
    assert (error < 1e-6) == stable


def test_the_codecs_of_models_and_trackers_draw_apart() -> None:
    """Alike values would be rounded alike."""
    each, model = bound(rule("beer", choose="all", compression={"name": "qsgd"}), draw(1, 400))[0], draw(1, 400)[0]
    seen = view(make("ring", nodes=4), 0, 0, 1)
    each.begin(model, seen)
    each._copies["x"].public.zero_()  # type: ignore[attr-defined]
    each.tracked.copy_(model)  # type: ignore[attr-defined]
    tensors = each.outgoing(model, seen)[1].tensors
    coded = [name.removeprefix("x.") for name in tensors if name.startswith("x.values")]
    assert any(not torch.equal(tensors[f"x.{name}"], tensors[f"v.{name}"]) for name in coded)


@pytest.mark.parametrize(("setting", "says"), [
    ("graph={name: one_peer_exponential, nodes: 16}", "beer needs a static graph"),
    ("node.schedule=overlapped", "beer works with schedule: sequential only"),
    ("node.missing=return_weight", "beer cannot recover from a missing payload"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(QUICKSTART, ["sharing={name: beer}", setting])
