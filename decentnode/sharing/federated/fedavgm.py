"""Federated averaging with momentum on the server."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.federated.fedavg import FedAvgConfig
from decentnode.sharing.federated.rounds import Federated


class FedAvgMConfig(FedAvgConfig):
    server_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the server (beta)."""


class FedAvgM(Federated):
    """v <- beta v + d, x <- x + eta v with the mean change d (Hsu et al. 2019, arXiv 1909.06335, section 4.3)."""

    Config: ClassVar[type[component.Config]] = FedAvgMConfig
    config: FedAvgMConfig
    TENSORS: ClassVar[tuple[str, ...]] = ("velocity",)
    SURVIVING: ClassVar[tuple[str, ...]] = TENSORS

    def __init__(self, config: FedAvgMConfig) -> None:
        super().__init__(config)
        self.velocity: Tensor | None = None
        """v [P], on the server."""

    def step(self, model: Tensor, change: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.velocity is None:
            self.velocity = change.clone()
        else:
            self.velocity.mul_(self.config.server_momentum).add_(change)
        model.add_(self.velocity, alpha=self.config.server_lr)
