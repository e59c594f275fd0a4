"""Federated averaging: the server takes the mean of the clients' changes."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.federated.rounds import Federated, FederatedConfig


class FedAvgConfig(FederatedConfig):
    server_lr: float = Field(1.0, gt=0)
    """Step of the server along the mean change (eta). With 1, it takes the mean of the clients' models."""


class FedAvg(Federated):
    """x <- x + eta sum_k (n_k / n) d_k over the clients that answered (McMahan et al. 2017, arXiv 1602.05629,
    algorithm 1); d_k is the change that the local steps of client k made to x, n_k the number of its samples."""

    Config: ClassVar[type[component.Config]] = FedAvgConfig
    config: FedAvgConfig

    def step(self, model: Tensor, change: Tensor, view: RoundView) -> None:  # noqa: ARG002
        model.add_(change, alpha=self.config.server_lr)
