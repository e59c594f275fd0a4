"""SlowMo: an outer momentum of the change between two exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig
from decentnode.sharing.state import MomentumAndRate


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
