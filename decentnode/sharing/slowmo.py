"""SlowMo: momentum of what happens between two exchanges."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode import component
from decentnode.graph.base import RoundView
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig
from decentnode.sharing.state import Tensors


class OuterConfig(LocalSGDConfig):
    outer_lr: float = Field(1.0, gt=0)
    """Step of the outer optimizer."""
    outer_momentum: float = Field(0.5, ge=0, lt=1)
    """Momentum of the outer optimizer."""


class SlowMo(Tensors, LocalSGD):
    """u <- b u + (x0 - x'),  x0 <- x0 - a u at every exchange, x' the mixed model (arXiv 1910.00643, algorithm 1).

    The learning rate is folded into u. With momentum 0 and outer_lr 1 it is local SGD.
    """

    Config: ClassVar[type[component.Config]] = OuterConfig
    needs_sequential: ClassVar[bool] = True
    nesterov: ClassVar[bool] = False
    TENSORS: ClassVar[tuple[str, ...]] = ("start", "momentum")

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, OuterConfig)
        self.lr, self.beta = config.outer_lr, config.outer_momentum
        self.start: Tensor | None = None
        self.momentum: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.start is None:
            self.start, self.momentum = model.clone(), torch.zeros_like(model)

    def finish(self, model: Tensor, view: RoundView) -> None:
        if not self.meets(view.round) or self.start is None or self.momentum is None:
            return
        change = self.start - model
        self.momentum.mul_(self.beta).add_(change)
        step = change.add_(self.momentum, alpha=self.beta) if self.nesterov else self.momentum
        self.start.sub_(step, alpha=self.lr)
        model.copy_(self.start)
