"""Local SGD: nodes work alone for some rounds and average every `every`-th."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from decentnode import component
from decentnode.graph.base import RoundView
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full


def alone(view: RoundView) -> RoundView:
    """The same round without neighbors."""
    return replace(view, neighbors=(), sources=(), weights={view.uid: 1.0}, out_weights={view.uid: 1.0})


class LocalSGDConfig(SharingConfig):
    every: int = Field(2, ge=1)
    """Rounds from one exchange to the next."""


class LocalSGD(Full):
    """Local work for `every` rounds, then x_i <- sum_j W_ij x_j (Stich 2019, arXiv 1805.09767)."""

    Config: ClassVar[type[component.Config]] = LocalSGDConfig

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, LocalSGDConfig)
        self.every = config.every

    def meets(self, view: RoundView) -> bool:
        return (view.round + 1) % self.every == 0

    def plan(self, view: RoundView) -> RoundView:
        return view if self.meets(view) else alone(view)
