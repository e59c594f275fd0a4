"""Local SGD: nodes exchange only in every k-th round."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode.config import component
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full


class LocalSGDConfig(SharingConfig):
    every: int = Field(2, ge=1)
    """Number of rounds per exchange; nodes exchange in the last of these rounds."""


class LocalSGD(Full):
    """Local steps for `every` rounds, then x_i <- sum_j W_ij x_j (Stich 2019, arXiv 1805.09767)."""

    Config: ClassVar[type[component.Config]] = LocalSGDConfig
    STACKED = True

    def __init__(self, config: LocalSGDConfig) -> None:
        super().__init__(config)
        self.every = config.every

    def meets(self, round: int) -> bool:
        """Returns whether the round has an exchange."""
        return (round + 1) % self.every == 0

    def exchange_number(self, round: int) -> int | None:
        return round // self.every if self.meets(round) else None


def stable_momentum(momentum: float, growth: Callable[[float], float]) -> float | None:
    """Returns the largest multiple of 0.1 below `momentum` of an outer optimizer with which models converge without
    local steps; None if there is none. growth: returns the factor by which differences grow with a momentum."""
    return next((b for b in np.arange(9, -1, -1) / 10 if b < momentum and growth(b) < 1), None)
