"""FedProx: clients are pulled toward the server's model while they train."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.federated.fedavg import FedAvg, FedAvgConfig
from decentnode.sharing.federated.rounds import Federated


class FedProxConfig(FedAvgConfig):
    proximal: float = Field(0.01, ge=0)
    """Strength of the pull to the server's model in every local step (mu). 0 is fedavg."""


class FedProx(FedAvg):
    """Every local step takes g + mu (y - x) for the gradient g at the client's model y, with x the server's model from
    which it began (Li et al. 2020, arXiv 1812.06127, algorithm 2). The server does what that of fedavg does."""

    Config: ClassVar[type[component.Config]] = FedProxConfig
    config: FedProxConfig
    requirements = replace(Federated.requirements, gradient=True)

    def __init__(self, config: FedProxConfig) -> None:
        super().__init__(config)
        self._model: Tensor | None = None
        """The model [P] itself, which the local steps change in place."""

    def begin(self, model: Tensor, view: RoundView) -> None:
        super().begin(model, view)
        self._model = model

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:  # noqa: ARG002
        assert self._model is not None and self.start is not None
        return gradient.add_(self._model - self.start, alpha=self.config.proximal)
