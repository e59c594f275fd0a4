"""The rating that a user gives an item."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from decentnode.config.component import Config
from decentnode.metrics.figures import LOSS, Metric
from decentnode.tasks.base import Task, needs

if TYPE_CHECKING:
    from torch import Tensor

RMSE = Metric(
    "rmse", "as the ratings", "the root of the mean squared error of the test ratings", "lower", word="RMSE",
)  # fmt: skip
MAE = Metric("mae", "as the ratings", "the mean absolute error of the test ratings", "lower", word="MAE")


class RatingConfig(Config):
    name: str = "rating"


class Rating(Task):
    """Outputs [B] or [B, 1] and targets [B] are ratings; inputs [B, 2] are the numbers of users and items."""

    Config: ClassVar[type[Config]] = RatingConfig
    loss = "mse"
    metrics = (RMSE, MAE, LOSS)
    sums = ("squared_error", "absolute_error")

    def align(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return (outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs), targets

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape != targets.shape or targets.ndim != 1 or not targets.is_floating_point():
            raise needs("rating", "one output and one number as target per sample", outputs, targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        error = (outputs - targets).double()
        return {"squared_error": error.square().sum(), "absolute_error": error.abs().sum()}

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "rmse": math.sqrt(sums["squared_error"] / sums["count"]),
            "mae": sums["absolute_error"] / sums["count"],
        }
