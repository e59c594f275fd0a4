"""Quadratic problems with a known optimum, and functions that run rounds of a rule on them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decentnode.graph.topology import Topology
from tests.sharing.contract import RuleFactory, rule, run_round, set_up_rules


def error_on_quadratics(name: str, graph: Topology, rounds: int, lr: float, **options: object) -> float:
    """Returns mean ||x_i - x*||^2 after so many rounds, each with one gradient step on f_i = |a_i (x - b_i)|^2 / 2 of 5
    elements, in float64. a_i and b_i differ by node, so that rules which do not correct for it are biased."""
    n, size = graph.num_nodes, 5
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(n, size, generator=generator, dtype=torch.float64) + 0.5
    b = 2 * torch.randn(n, size, generator=generator, dtype=torch.float64)
    optimum = (a * a * b).sum(0) / (a * a).sum(0)
    models = [torch.zeros(size, dtype=torch.float64) for _ in range(n)]
    rules = set_up_rules(rule(name, **options), models)
    for r in range(rounds):
        run_round(rules, models, graph, r, step=lambda uid, model: model.sub_(a[uid] ** 2 * (model - b[uid]), alpha=lr))
    return float(torch.stack([(model - optimum).square().sum() for model in models]).mean())


def distance_from_consensus(models: list[Tensor]) -> float:
    """Returns ||x - mean x|| over all nodes, relative to ||x||."""
    stacked = torch.stack(models).double()
    return float((stacked - stacked.mean(0)).norm() / stacked.norm())


# -- one problem with a curvature and a target per node, for tests that compare a rule with a recursion in NumPy

N, SIZE, ROUNDS = 9, 5, 60
RANDOM = np.random.default_rng(4)
CURVATURE, TARGET = RANDOM.uniform(0.5, 1.5, (N, SIZE)), RANDOM.normal(size=(N, SIZE))
START = RANDOM.normal(size=SIZE) + np.zeros((N, SIZE))


def all_gradients(x: np.ndarray) -> np.ndarray:
    """Returns the gradients of all nodes, [N, SIZE]. x: the models, [N, SIZE]."""
    return CURVATURE * (x - TARGET)


def models_after_rounds(options: dict[str, object], graph: Topology, lrs: list[float]) -> np.ndarray:
    """Returns the models of all nodes, [N, SIZE], that began at START, after one round of the rule per learning rate.
    options: the rule's keys, with its name."""
    models = [torch.from_numpy(x.copy()) for x in START]
    rules = set_up_rules(rule(**options), models)  # type: ignore[arg-type]
    curvature, target = torch.from_numpy(CURVATURE), torch.from_numpy(TARGET)
    for round, lr in enumerate(lrs):
        def step(uid: int, x: Tensor, lr: float = lr) -> None:
            x.sub_(curvature[uid] * (x - target[uid]), alpha=lr)

        run_round(rules, models, graph, round, step=step, lr=lr)
    return torch.stack(models).numpy()


class Quadratics:
    """f_i(x) = (x - c_i)^T H_i (x - c_i) / 2 with a diagonal H_i, in float64 (docs/explanation/algorithms.rst, "Known
    errors")."""

    def __init__(self, n: int = 16, size: int = 10) -> None:
        generator = np.random.default_rng(0)
        self.curvature = torch.from_numpy(generator.uniform(0.5, 1.5, (n, size)))
        self.target = torch.from_numpy(generator.normal(size=(n, size)))
        self.optimum = (self.curvature * self.target).sum(0) / self.curvature.sum(0)

    def error(self, make_rule: RuleFactory, graph: Topology, rounds: int, lr: float, momentum: float = 0.0) -> float:
        """Returns mean ||x_i - x*||^2 after so many rounds of one gradient step each, from zero. momentum: the local
        optimizer's."""
        models, velocities = ([torch.zeros_like(target) for target in self.target] for _ in range(2))
        rules = set_up_rules(make_rule, models)

        def step(uid: int, x: Tensor) -> None:
            x.sub_(velocities[uid].mul_(momentum).add_(self.curvature[uid] * (x - self.target[uid])), alpha=lr)

        for r in range(rounds):
            run_round(rules, models, graph, r, step=step)
        return float(torch.stack([(x - self.optimum).square().sum() for x in models]).mean())
