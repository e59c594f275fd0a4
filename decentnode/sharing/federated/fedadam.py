"""FedAdam: the server takes steps of Adam along the mean change."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.federated.rounds import Federated, FederatedConfig


class FedAdamConfig(FederatedConfig):
    server_lr: float = Field(0.03, gt=0)
    """Step of the server (eta)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of changes."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the mean of their squares."""
    tau: float = Field(1e-3, gt=0)
    """Added to the root of the squares: how adaptive the server is; the mean of the squares starts at tau squared."""


class FedAdam(Federated):
    """m <- b1 m + (1 - b1) d, v <- b2 v + (1 - b2) d^2, x <- x + eta m / (sqrt(v) + tau), with the mean change d, m of
    0 and v of tau^2 before the first round (Reddi et al. 2021, arXiv 2003.00295, algorithm 2)."""

    Config: ClassVar[type[component.Config]] = FedAdamConfig
    config: FedAdamConfig
    TENSORS: ClassVar[tuple[str, ...]] = ("first", "second")
    SURVIVING: ClassVar[tuple[str, ...]] = TENSORS

    def __init__(self, config: FedAdamConfig) -> None:
        super().__init__(config)
        self.first: Tensor | None = None
        """m [P], on the server."""
        self.second: Tensor | None = None
        """v [P], on the server."""

    def step(self, model: Tensor, change: Tensor, view: RoundView) -> None:  # noqa: ARG002
        if self.first is None or self.second is None:
            self.first, self.second = torch.zeros_like(change), torch.full_like(change, self.config.tau**2)
        self.first.mul_(self.config.beta1).add_(change, alpha=1.0 - self.config.beta1)
        self.remember(self.second, change.square())
        model.addcdiv_(self.first, self.second.sqrt().add_(self.config.tau), value=self.config.server_lr)

    def remember(self, second: Tensor, square: Tensor) -> None:
        """Updates v with d^2, in place."""
        second.mul_(self.config.beta2).add_(square, alpha=1.0 - self.config.beta2)
