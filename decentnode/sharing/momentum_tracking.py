"""Momentum tracking: gradient tracking whose tracked quantity is a momentum."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.sharing.gradient_tracking import GradientTracking, TrackingConfig
from decentnode.sharing.qg_momentum import MomentumConfig


class MildMomentumConfig(MomentumConfig):
    momentum: float = Field(0.5, ge=0, lt=1)
    """Decay of the rule's own momentum. The papers have 0.9, with a local optimizer without momentum."""


class MomentumTrackingConfig(TrackingConfig, MildMomentumConfig):
    pass


class MomentumTracking(GradientTracking):
    """Gradient tracking of the momentum m <- b m + g instead of g (Takezawa et al., TMLR 2023, with form dsgt)."""

    Config: ClassVar[type[component.Config]] = MomentumTrackingConfig
    STACKED = True

    def __init__(self, config: MomentumTrackingConfig) -> None:
        super().__init__(config)
        self.beta = config.momentum

    def smoothed(self, gradient: Tensor) -> Tensor:
        self.momentum = torch.zeros_like(gradient) if self.momentum is None else self.momentum
        return self.momentum.mul_(self.beta).add_(gradient).clone()
