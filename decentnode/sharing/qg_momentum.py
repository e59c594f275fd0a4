"""Quasi-global momentum: momentum computed from the change of the mixed model, which estimates the global direction."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full
from decentnode.sharing.state import MomentumAndRate


class MomentumConfig(SharingConfig):
    momentum: float = Field(0.9, ge=0, lt=1)
    """Decay of the rule's own momentum; the local optimizer should have none."""


class QuasiGlobalMomentum(MomentumAndRate, Full):
    """x' = W (x - u_t - lr_t b m),  m <- b m + (1 - b) (x - x') / lr_t (QG-DSGDm, arXiv 2102.04761, algorithm 1).

    u_t is the total update of the round's local steps (d2.py), lr_t their learning rate. The momentum m has the unit of
    gradients: if the learning rate decreases, the step along m decreases with it at once. If the rate more than doubles
    between two rounds (restarts of a schedule), m is first made smaller, so that this step at most doubles: m holds the
    mixing of models that older, higher rates drove apart, divided by a rate that was low. This is not in the paper. In
    a round with learning rate 0, m is not changed. The local optimizer should have no momentum of its own.
    """

    Config: ClassVar[type[component.Config]] = MomentumConfig
    requirements = replace(Full.requirements, sequential=True, doubly_stochastic=True)
    STACKED = True
    TENSORS: ClassVar[tuple[str, ...]] = ("x", "momentum")

    def __init__(self, config: MomentumConfig) -> None:
        super().__init__(config)
        self.beta = config.momentum
        self.x: Tensor | None = None
        self.momentum: Tensor | None = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self.x = model.clone()
        self.momentum = torch.zeros_like(model) if self.momentum is None else self.momentum

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        assert self.momentum is not None
        self.limit_momentum(view.lr)
        model.sub_(self.momentum, alpha=self.beta * view.lr)

    def finish(self, model: Tensor, view: RoundView) -> None:
        if self.x is not None and self.momentum is not None and view.lr > 0:
            self.momentum.mul_(self.beta).add_(self.x.sub_(model), alpha=(1 - self.beta) / view.lr)
        self.x = None
