"""How rules whose momentum is in units of gradients follow the learning rate, and what outlives a generation."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.parallel.planning.plan import Plan
from decentnode.sharing.base import Sharing
from decentnode.sharing.rounds import rule_view
from decentnode.sharing.slowmo import SlowMo
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.helpers import Quadratics

NAMES = pytest.mark.parametrize("name", ["qg_momentum", "decentlam"])
RING = make("ring", nodes=16)
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


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


@pytest.mark.parametrize("every", [2, 10])
def test_a_restart_of_the_schedule_moves_slowmo_no_further_than_local_sgd(every: int) -> None:
    """With exchanges every 10 rounds, the momentum of the last turn before a restart was divided by a rate of 2.5e-5:
    nodes went 2,000 away from the optimum."""
    cycle = [0.05 * (1 + math.cos(math.pi * t / 100)) for t in range(100)]

    def largest_error(name: str) -> float:
        problem, largest = Quadratics(), 0.0
        models = [torch.zeros_like(target) for target in problem.target]
        rules = set_up_rules(rule(name, every=every), models)
        for r, lr in enumerate(cycle * 3):
            def step(uid: int, x: torch.Tensor, lr: float = lr) -> None:
                x.sub_(problem.curvature[uid] * (x - problem.target[uid]), alpha=lr)

            run_round(rules, models, RING, r, step=step, lr=lr)
            largest = max(largest, float((torch.stack(models) - problem.optimum).norm(dim=1).mean()) * (r >= 90))
        return largest

    assert largest_error("slowmo") < 1.5 * largest_error("local_sgd")


@pytest.mark.parametrize(("name", "options", "coasting"), [
    ("slowmo", {"outer_lr": 0.5, "outer_momentum": 0.6}, -0.5 * 0.6 * 0.01),
    ("diloco", {"outer_lr": 0.5, "outer_momentum": 0.6}, -0.5 * 0.6 * 0.6),
    ("noloco", {"momentum": 0.6}, 0.6),
])  # fmt: skip
def test_outer_momentum_outlives_a_generation_which_may_have_another_model(
    name: str, options: dict[str, float], coasting: float
) -> None:
    """Nodes that do not train move by their momentum alone, from the new model on."""
    graph, models = make("complete", nodes=4), [torch.zeros(20, dtype=torch.float64) for _ in range(4)]
    rules = set_up_rules(rule(name, every=3, **options), models)
    for r in range(4):
        run_round(rules, models, graph, r, step=lambda _, model: model.add_(1.0), lr=0.01)
    momentum = rules[0].state_dict()["momentum"]
    new_rules, new_models = set_up_rules(rule(name, every=3, **options), models), [x + 100.0 for x in models]
    for old, new in zip(rules, new_rules, strict=True):
        new.succeed(old)
    expected = new_models[0] + coasting * momentum
    for r in (4, 5):
        run_round(new_rules, new_models, graph, r, pull=0.0, lr=0.01)
    assert momentum.abs().min() > 0.1
    for model in new_models:
        torch.testing.assert_close(model, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("name", "momentum", "family", "nodes", "diverges"), [
    ("diloco", 0.9, "one_peer_exponential", 16, True), ("diloco", 0.8, "one_peer_exponential", 16, False),
    ("diloco", 0.9, "base_k_plus_1", 7, True), ("diloco", 0.9, "ring", 16, False),
    ("slowmo", 0.9, "one_peer_exponential", 8, True), ("slowmo", 0.5, "one_peer_exponential", 16, False),
])  # fmt: skip
def test_outer_steps_that_drive_models_apart_are_refused(
    name: str, momentum: float, family: str, nodes: int, diverges: bool
) -> None:
    """Without local steps, differences between models grow by the factor that the refusal names."""
    graph, models = make(family, nodes=nodes), random_models(nodes, 6, torch.float64)
    make_rule = rule(name, every=1, outer_momentum=momentum)
    rules, period = set_up_rules(make_rule, models), graph.period or 1
    distances = []
    for r in range(100 * period + 1):
        run_round(rules, models, graph, r, pull=0.0)
        stacked = torch.stack(models)
        distances.append(float((stacked - stacked.mean(0)).norm()))
    slow = rules[0]
    assert isinstance(slow, SlowMo)
    growth, measured = slow.growth(graph, momentum), (distances[-1] / distances[-1 - 50 * period]) ** (0.02 / period)
    assert growth == pytest.approx(measured, rel=0.02) and (growth > 1) == diverges
    assert (f"grow by {growth - 1:.1%} per exchange; use outer_momentum" in slow.objection(graph)) == diverges
    plan = nullcontext() if not diverges else pytest.raises(ValueError, match="drives the models apart on this graph")
    with plan:
        Plan(graph, make_rule(), 0)


@pytest.mark.parametrize(("name", "momentum", "growth"), [("slowmo", 0.5, 1.032), ("diloco", 0.8, 1.016)])
def test_a_momentum_that_converges_may_diverge_after_nodes_died(name: str, momentum: float, growth: float) -> None:
    """The numbers of algorithms.rst: one_peer_exponential with 16 nodes, without nodes 3 and 4."""
    graph, members = make("one_peer_exponential", nodes=16), [uid for uid in range(16) if uid not in (3, 4)]
    models, period = random_models(14, 6, torch.float64), graph.period
    assert period is not None
    rules = set_up_rules(rule(name, every=1, outer_momentum=momentum), models)
    slow = rules[0]
    assert isinstance(slow, SlowMo) and not slow.objection(graph)
    assert slow.growth(graph, momentum, members) == pytest.approx(growth, rel=2e-3)
    distances = []
    for r in range(100 * period):
        view = replace(rule_view(slow, graph, 0, r, 1), lr=1.0)
        for each, model in zip(rules, models, strict=True):
            each.begin(model, view)
        mixed = torch.from_numpy(graph.matrix(r, members)) @ torch.stack(models)
        for each, model, row in zip(rules, models, mixed, strict=True):
            each.finish(model.copy_(row), view)
        distances.append(float((mixed - mixed.mean(0)).norm()))
    assert (distances[-1] / distances[-1 - 50 * period]) ** (0.02 / period) == pytest.approx(growth, rel=2e-3)


def test_runs_whose_outer_steps_drive_models_apart_are_refused() -> None:
    sets = ["sharing={name: diloco}", "graph={name: one_peer_exponential, nodes: 16}"]
    with pytest.raises(ConfigError, match=r"sharing: diloco drives .* use outer_momentum: 0.8 or less, or a complete"):
        load(QUICKSTART, sets)
    load(QUICKSTART, [*sets, "sharing.outer_momentum=0.8"])
