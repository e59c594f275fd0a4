"""DecentLaM: momentum of the whole step, mixing included."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.momentum_tracking import MildMomentumConfig
from decentnode.sharing.qg_momentum import QuasiGlobalMomentum


class DecentLaM(QuasiGlobalMomentum):
    """m <- b m + (x - W (x - u_t)) / lr_t,  x <- x - lr_t m (arXiv 2104.11981, algorithm 2); for static symmetric W.

    The momentum m has the unit of gradients, and is limited where the rate rises steeply, as in qg_momentum.py. In a
    round with learning rate 0 nodes only mix.
    """

    Config: ClassVar[type[component.Config]] = MildMomentumConfig
    requirements = replace(QuasiGlobalMomentum.requirements, static=True, symmetric=True)
    STACKED = True

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:  # noqa: ARG002
        self.limit_momentum(view.lr)

    def finish(self, model: Tensor, view: RoundView) -> None:
        if self.x is not None and self.momentum is not None and view.lr > 0:
            self.momentum.mul_(self.beta).add_(self.x - model, alpha=1 / view.lr)
            torch.sub(self.x, self.momentum, alpha=view.lr, out=model)
        self.x = None
