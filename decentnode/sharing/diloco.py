"""DiLoCo: an outer Nesterov optimizer, one step per exchange, with many rounds between two exchanges."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.sharing.slowmo import OuterConfig, SlowMo


class DiLoCoConfig(OuterConfig):
    every: int = Field(10, ge=1)
    """Number of rounds per exchange; nodes exchange in the last of these rounds."""
    outer_lr: float = Field(0.7, gt=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer optimizer."""


class DiLoCo(SlowMo):
    """SlowMo with an outer Nesterov step (arXiv 2311.08105, algorithm 1); the inner optimizer keeps its state.

    Its outer gradient is the change of the model between two exchanges, not divided by the inner learning rate.
    """

    Config: ClassVar[type[component.Config]] = DiLoCoConfig
    nesterov: ClassVar[bool] = True
    gradient_units: ClassVar[bool] = False
