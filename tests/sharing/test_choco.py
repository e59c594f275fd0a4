"""Properties of choco and of the rules built on it (qsgd, sign, stc) beyond the contract."""

from __future__ import annotations

import pytest
import torch

from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, run_rounds, set_up_rules
from tests.sharing.helpers import distance_from_consensus

RING = make("ring", nodes=8)


@pytest.mark.slow
def test_choco_keeps_the_mean_that_naive_compression_loses() -> None:
    """The spectral gap of a ring of 8 is .195: with step .2 at most (1 - .2 * .195)^600 < 1e-10 of the distance from
    consensus is left (docs/explanation/algorithms.rst, "Steps of compressed rules")."""
    models = random_models(8, 50, torch.float64)
    mean = torch.stack(models).mean(0)
    run_rounds(rule("choco", fraction=0.2, step_size=0.2), RING, models, 600)
    assert distance_from_consensus(models) < 1e-10
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-12, rtol=0)
    naive = random_models(8, 50, torch.float64)
    run_rounds(rule("full", compression={"name": "int4"}), RING, naive, 300)
    assert float((torch.stack(naive).mean(0) - mean).abs().max()) > 1e-2


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1.5e-3), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("options", [
    {"fraction": 0.5}, {"choose": "all", "compression": {"name": "int8"}},
])  # fmt: skip
def test_rounding_errors_of_half_precision_do_not_move_the_mean_in_every_round(
    options: dict[str, object], dtype: torch.dtype, bound: float
) -> None:
    """Those that stayed in the pull moved it by 1e-2 (float16) and 7e-2 (bfloat16) of its norm in these rounds, ten
    times as far as now, and further in each later round."""
    models = random_models(8, 400, dtype)
    rules, before = set_up_rules(rule("choco", **options), models), torch.stack(models).double().mean(0)
    for r in range(200):
        run_round(rules, models, RING, r, pull=0.0)
    assert float((torch.stack(models).double().mean(0) - before).norm() / before.norm()) < bound


@pytest.mark.parametrize("options", [
    {"name": "qsgd"}, {"name": "sign"}, {"name": "stc", "fraction": 0.2, "step_size": 0.1},
    {"name": "choco", "choose": "all", "compression": {"name": "int4", "unbiased": True}},
    {"name": "choco", "choose": "random", "fraction": 0.3, "step_size": 0.2},
])  # fmt: skip
@pytest.mark.slow
def test_nodes_reach_consensus_and_keep_the_mean_with_every_compressor(options: dict[str, object]) -> None:
    models = random_models(8, 50, torch.float64)
    mean = torch.stack(models).mean(0)
    run_rounds(rule(**options), RING, models, 500)  # type: ignore[arg-type]
    assert distance_from_consensus(models) < 1e-3
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-9, rtol=0)


@pytest.mark.slow
def test_choco_recovers_from_a_lost_payload() -> None:
    """Neighbors drop their copies of a node whose payload was lost, and get them anew."""
    models = random_models(6, 40, torch.float64)
    graph, rules = make("ring", nodes=6), set_up_rules(rule("choco", fraction=0.3, step_size=0.2), models)
    for r in range(20):
        run_round(rules, models, graph, r, pull=0.0)
    run_round(rules, models, graph, 20, pull=0.0, missing=frozenset({2}))
    assert 2 not in rules[1].copies and 2 not in rules[3].copies  # type: ignore[attr-defined]
    for r in range(21, 400):
        run_round(rules, models, graph, r, pull=0.0)
    for uid in (1, 3):
        assert torch.equal(rules[uid].copies[2], rules[2].public)  # type: ignore[attr-defined]
    assert distance_from_consensus(models) < 1e-4
