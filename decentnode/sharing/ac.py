"""Adaptive consensus: the strength of mixing changes over the rounds."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full


class ACConfig(SharingConfig):
    factor: float = Field(1.0, ge=0, le=1)
    """Strength of mixing in the first round."""
    final: float = Field(0.1, ge=0, le=1)
    """Strength of mixing from round `rounds` on."""
    rounds: int = Field(100, ge=1)
    """Rounds over which the strength changes linearly from `factor` to `final`."""


class AdaptiveConsensus(Full):
    """x <- x + a_t (W x - x) with a_t going from `factor` to `final` by rounds (DSGD-AC, arXiv 2602.02899, whose a_t
    follows the learning rate)."""

    Config: ClassVar[type[component.Config]] = ACConfig
    config: ACConfig

    def plan(self, view: RoundView) -> RoundView:
        config = self.config
        a = config.factor + (config.final - config.factor) * min(1.0, view.round / config.rounds)
        return view.part_way(a)
