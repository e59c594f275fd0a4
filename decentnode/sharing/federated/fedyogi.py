"""FedYogi: FedAdam in which the mean of squares changes by at most a fraction of the newest square."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from decentnode.config import component
from decentnode.sharing.federated.fedadam import FedAdam, FedAdamConfig


class FedYogiConfig(FedAdamConfig):
    pass


class FedYogi(FedAdam):
    """As FedAdam with v <- v - (1 - b2) d^2 sign(v - d^2) (Reddi et al. 2021, arXiv 2003.00295, algorithm 2)."""

    Config: ClassVar[type[component.Config]] = FedYogiConfig

    def remember(self, second: Tensor, square: Tensor) -> None:
        second.sub_(square * (second - square).sign(), alpha=1.0 - self.config.beta2)
