"""Problems whose optimum is known, and rounds of a rule on them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decentnode.graph.topology import Topology
from tests.sharing.contract import Make, bound, one_round, rule


def quadratics(name: str, graph: Topology, rounds: int, lr: float, **options: object) -> float:
    """mean ||x_i - x*||^2 after gossip gradient descent on f_i = |a_i (x - b_i)|^2 / 2 with unequal a_i and b_i."""
    n, size = graph.num_nodes, 5
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(n, size, generator=generator, dtype=torch.float64) + 0.5
    b = 2 * torch.randn(n, size, generator=generator, dtype=torch.float64)
    best = (a * a * b).sum(0) / (a * a).sum(0)
    models = [torch.zeros(size, dtype=torch.float64) for _ in range(n)]
    rules = bound(rule(name, **options), models)
    for r in range(rounds):
        one_round(rules, models, graph, r, step=lambda uid, model: model.sub_(a[uid] ** 2 * (model - b[uid]), alpha=lr))
    return float(torch.stack([(model - best).square().sum() for model in models]).mean())


def spread(models: list[Tensor]) -> float:
    """||x - mean x|| over all nodes, relative to ||x||."""
    stacked = torch.stack(models).double()
    return float((stacked - stacked.mean(0)).norm() / stacked.norm())


# -- one problem with a curvature and a target per node, for recursions that are written down in NumPy beside a rule

N, SIZE, ROUNDS = 9, 5, 60
DRAWS = np.random.default_rng(4)
CURVATURE, TARGET = DRAWS.uniform(0.5, 1.5, (N, SIZE)), DRAWS.normal(size=(N, SIZE))
START = DRAWS.normal(size=SIZE) + np.zeros((N, SIZE))


def gradient(x: np.ndarray) -> np.ndarray:
    """Of all nodes at once. x: [N, SIZE], the models."""
    return CURVATURE * (x - TARGET)


def models_after(options: dict[str, object], graph: Topology, lrs: list[float]) -> np.ndarray:
    """[N, SIZE]: models from START after a round of the rule with each learning rate."""
    models = [torch.from_numpy(x.copy()) for x in START]
    rules = bound(rule(**options), models)  # type: ignore[arg-type]
    h, c = torch.from_numpy(CURVATURE), torch.from_numpy(TARGET)
    for r, lr in enumerate(lrs):
        def step(uid: int, x: Tensor, lr: float = lr) -> None:
            x.sub_(h[uid] * (x - c[uid]), alpha=lr)

        one_round(rules, models, graph, r, step=step, lr=lr)
    return torch.stack(models).numpy()


class Quadratics:
    """f_i(x) = (x - c_i)^T H_i (x - c_i) / 2, diagonal H_i (docs/explanation/algorithms.rst, "Known errors")."""

    def __init__(self, n: int = 16, size: int = 10) -> None:
        generator = np.random.default_rng(0)
        self.h = torch.from_numpy(generator.uniform(0.5, 1.5, (n, size)))
        self.c = torch.from_numpy(generator.normal(size=(n, size)))
        self.best = (self.h * self.c).sum(0) / self.h.sum(0)

    def error(self, make_rule: Make, graph: Topology, rounds: int, lr: float, momentum: float = 0.0) -> float:
        """mean ||x_i - x*||^2 after so many rounds of one gradient step each. momentum: the local optimizer's."""
        models, velocities = ([torch.zeros_like(c) for c in self.c] for _ in range(2))
        rules = bound(make_rule, models)

        def step(uid: int, x: Tensor) -> None:
            x.sub_(velocities[uid].mul_(momentum).add_(self.h[uid] * (x - self.c[uid])), alpha=lr)

        for r in range(rounds):
            one_round(rules, models, graph, r, step=step)
        return float(torch.stack([(x - self.best).square().sum() for x in models]).mean())
