"""How qg_momentum and decentlam, whose momentum is in units of gradients, follow the learning rate."""

from __future__ import annotations

import math

import pytest
import torch

from decentnode.sharing.base import Sharing
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.helpers import Quadratics

NAMES = pytest.mark.parametrize("name", ["qg_momentum", "decentlam"])
RING = make("ring", nodes=16)


def distances(name: str, schedule: list[float]) -> list[float]:
    """Returns the consensus distance, not relative, after each round with one of these learning rates."""
    problem, found = Quadratics(), []
    models = [torch.zeros_like(target) for target in problem.target]
    rules = set_up_rules(rule(name), models)
    for r, lr in enumerate(schedule):
        def step(uid: int, x: torch.Tensor, lr: float = lr) -> None:
            x.sub_(problem.curvature[uid] * (x - problem.target[uid]), alpha=lr)

        run_round(rules, models, RING, r, step=step, lr=lr)
        stacked = torch.stack(models)
        found.append(float((stacked - stacked.mean(0)).square().sum(1).mean().sqrt()))
    return found


@NAMES
def test_a_restart_of_the_schedule_drives_nodes_no_further_apart_than_without_momentum(name: str) -> None:
    """The step along the momentum grew with the rate, 4000 times in one round: nodes were 8 and 10 apart."""
    cycle = [0.05 * (1 + math.cos(math.pi * t / 100)) for t in range(100)]
    assert max(distances(name, cycle * 3)) < 1.5 * max(distances("full", cycle * 3))


def rates_in_state(rules: list[Sharing]) -> set[float]:
    return {each.state_dict()["lr"] for each in rules}


@NAMES
def test_the_rate_is_in_checkpoints_and_those_without_it_load(name: str) -> None:
    make_rule, graph = rule(name), make("ring", nodes=6)
    models, others = random_models(6, 20), random_models(6, 20)
    rules, resumed, without = (set_up_rules(make_rule, models) for _ in range(3))
    for r in range(3):
        run_round(rules, models, graph, r, lr=0.01)
    assert rates_in_state(rules) == {0.01}
    for old, new, oldest, model, other in zip(rules, resumed, without, models, others, strict=True):
        state = old.state_dict()
        new.load_state_dict(state)
        oldest.load_state_dict({key: value for key, value in state.items() if key != "lr"})
        other.copy_(model)
    unlimited = [model.clone() for model in models]
    for each, of in ((rules, models), (resumed, others), (without, unlimited)):
        run_round(each, of, graph, 3, lr=1.0)
    assert all(torch.equal(x, y) for x, y in zip(models, others, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(models, unlimited, strict=True))
