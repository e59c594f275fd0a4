"""SlowMo: an outer momentum of the change between two exchanges."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import Graph, RoundView
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig, stable_momentum
from decentnode.sharing.state import MomentumAndRate

MAX_CHECKED_NODES = 128
"""Graphs of more nodes are not checked for outer steps that drive models apart: it would take seconds."""
CHECKED_EXCHANGES = 32
"""The number of exchanges that are checked on a graph without a period, or with a longer one."""


class OuterConfig(LocalSGDConfig):
    outer_lr: float = Field(1.0, gt=0)
    """Learning rate a of the outer optimizer."""
    outer_momentum: float = Field(0.5, ge=0, lt=1)
    """Momentum b of the outer optimizer."""


class SlowMo(MomentumAndRate, LocalSGD):
    """u <- b u + (x0 - x') / lr_t,  x0 <- x0 - a lr_t u at every exchange (arXiv 1910.00643, algorithm 1).

    x' is the mixed model, lr_t the learning rate of the round with the exchange. The momentum u has the unit of
    gradients: if the learning rate decreases, the step along u decreases with it at once. If the rate more than doubles
    between two exchanges (restarts of a schedule), u is first made smaller, so that the step along it at most doubles;
    this is not in the paper. In a round with learning rate 0 nodes only mix. With momentum 0 and outer_lr 1 this is
    local SGD.
    """

    Config: ClassVar[type[component.Config]] = OuterConfig
    requirements = replace(LocalSGD.requirements, sequential=True)
    nesterov: ClassVar[bool] = False
    gradient_units: ClassVar[bool] = True
    """Whether the change between two exchanges is divided by the learning rate."""
    STACKED = True
    TENSORS: ClassVar[tuple[str, ...]] = ("start", "momentum")

    def __init__(self, config: OuterConfig) -> None:
        super().__init__(config)
        self.outer_lr, self.beta = config.outer_lr, config.outer_momentum
        self.start: Tensor | None = None
        self.momentum: Tensor | None = None

    def growth(self, graph: Graph, momentum: float, members: Collection[int] | None = None) -> float:
        """Returns the factor by which differences between models grow per exchange without local steps: the spectral
        radius of (x0, v) -> (x0', v') over a period of the graph, without the mean of all models."""
        n = graph.num_nodes if members is None else len(members)
        exchanges = min(graph.period or CHECKED_EXCHANGES, CHECKED_EXCHANGES)
        same, zero = np.eye(n), np.zeros((n, n))
        product = np.kron(np.eye(2), same - 1 / n)
        for number in range(exchanges):
            change = np.hstack([same - graph.matrix(number, members), zero])
            velocity = change + np.hstack([zero, momentum * same])
            step = change + momentum * velocity if self.nesterov else velocity
            product = np.vstack([np.hstack([same, zero]) - self.outer_lr * step, velocity]) @ product
        return float(abs(np.linalg.eigvals(product)).max() ** (1 / exchanges))

    def objection(self, graph: Graph, members: Collection[int] | None = None) -> str:
        if graph.num_nodes > MAX_CHECKED_NODES or (growth := self.growth(graph, self.beta, members)) <= 1 + 1e-6:
            return ""
        stable = stable_momentum(self.beta, lambda momentum: self.growth(graph, momentum, members))
        instead = "a smaller outer_lr" if stable is None else f"outer_momentum: {stable:g} or less"
        return (f"drives the models apart on this graph with outer_lr {self.outer_lr:g} and outer_momentum "
                f"{self.beta:g}: without any training, their differences grow by {growth - 1:.1%} per exchange; use "
                f"{instead}, or a complete graph")  # fmt: skip

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.start is None:
            self.start = model.clone()
            self.momentum = torch.zeros_like(model) if self.momentum is None else self.momentum

    def succeed(self, former: Self) -> None:
        """Keeps the momentum. The model may be another one: the next change is counted from where a generation
        begins."""
        self.momentum, self.lr = former.momentum, former.lr

    def finish(self, model: Tensor, view: RoundView) -> None:
        if not self.meets(view.round) or self.start is None or self.momentum is None:
            return
        rate = view.lr if self.gradient_units else 1.0
        if rate == 0:
            self.start.copy_(model)
            return
        self.limit_momentum(rate)
        change = (self.start - model).div_(rate)
        self.momentum.mul_(self.beta).add_(change)
        step = change.add_(self.momentum, alpha=self.beta) if self.nesterov else self.momentum
        self.start.sub_(step, alpha=self.outer_lr * rate)
        model.copy_(self.start)
