"""The forces of elastic averaging and leader SGD: the papers' equations, invariants, and which arguments they change.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.sharing.forces import elastic_center_, elastic_pull_, leader_of, toward, toward_
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, view


def easgd(models: list[Tensor], center: Tensor, a: float) -> None:
    """Makes one step of EASGD of all nodes, without gradients, in place."""
    differences = [model - center for model in models]
    for model, difference in zip(models, differences, strict=True):
        assert elastic_pull_(model, difference, a) is model
    assert elastic_center_(center, torch.stack(differences).sum(0), a) is center


def test_elastic_forces_are_those_of_the_paper_and_keep_the_sum() -> None:
    models, center = random_models(5, 7, torch.float64), torch.zeros(7, dtype=torch.float64)
    x, c, total = torch.stack(models).numpy(), center.numpy().copy(), torch.stack(models).sum(0)
    for _ in range(20):
        easgd(models, center, 0.1)
        x, c = x - 0.1 * (x - c), (1 - 0.5) * c + 0.5 * x.mean(0)  # b = p a
        np.testing.assert_allclose(torch.stack(models).numpy(), x, atol=1e-14)
        np.testing.assert_allclose(center.numpy(), c, atol=1e-14)
    torch.testing.assert_close(center + torch.stack(models).sum(0), total)


def test_the_rule_elastic_on_a_complete_graph_is_easgd_with_one_center() -> None:
    """From equal centers, with b = p a: the nodes' centers stay equal, and are the center of EASGD."""
    n, a, start = 4, 0.2, torch.zeros(6, dtype=torch.float64)
    models, rules = random_models(n, 6, torch.float64), [rule("elastic", pull=a, center_pull=n * a)() for _ in range(n)]
    expected, center = [model.clone() for model in models], start.clone()
    for elastic in rules:
        elastic.begin(start, view(make("complete", nodes=n), 0, 0))  # sets its center to `start`
        elastic.x = None  # type: ignore[attr-defined]
    for r in range(10):
        run_round(rules, models, make("complete", nodes=n), r, 0.0)
        easgd(expected, center, a)
        torch.testing.assert_close(torch.stack(models), torch.stack(expected))
        for elastic in rules:
            torch.testing.assert_close(elastic.center, center)  # type: ignore[attr-defined]


@pytest.mark.parametrize("strength", [0.0, 0.3, 0.7, 1.0])
def test_toward_moves_a_tensor_by_a_fraction_of_the_difference(strength: float) -> None:
    x, y = random_models(2, 9)
    moved = toward(x, y, strength)
    assert moved is not x
    torch.testing.assert_close(moved, x + strength * (y - x))
    assert toward_(x, y, strength) is x and torch.equal(x, moved)


def test_the_leader_is_the_node_with_the_lowest_loss_and_of_equal_losses_the_lowest_uid() -> None:
    assert leader_of({3: 0.2, 1: 0.5, 2: 0.2}) == 2
    assert leader_of({0: math.nan, 1: 0.5, 2: math.nan}) == 1
    assert leader_of({0: math.nan, 1: math.inf}) == 0
    assert leader_of({7: math.nan}) == 7


def test_a_node_whose_loss_is_nan_follows_the_leader_of_the_others() -> None:
    models, graph = random_models(3, 5, torch.float64), make("complete", nodes=3)
    rules = [rule("leader", pull=1.0, average=0)() for _ in models]
    for uid, (each, loss) in enumerate(zip(rules, (math.nan, 2.0, 3.0), strict=True)):
        each.adjust(models[uid], view(graph, uid, 0), loss)
    sent = [each.outgoing(model.clone(), view(graph, uid, 0))
            for uid, (each, model) in enumerate(zip(rules, models, strict=True))]  # fmt: skip
    best = models[1].clone()
    for uid, (each, model) in enumerate(zip(rules, models, strict=True)):
        each.mix(model, {peer: sent[peer][uid] for peer in range(3) if peer != uid}, view(graph, uid, 0))
        torch.testing.assert_close(model, best)
