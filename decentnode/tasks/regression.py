"""One or several numbers for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from decentnode.config.component import Config
from decentnode.metrics.figures import LOSS, Metric
from decentnode.tasks.base import Task, needs

if TYPE_CHECKING:
    from torch import Tensor

MSE = Metric(
    "mse", "as the targets, squared", "the mean squared error of the test targets", "lower", word="MSE",
    logarithmic=True,
)  # fmt: skip
MAE = Metric("mae", "as the targets", "the mean absolute error of the test targets", "lower", word="MAE")
R2 = Metric(
    "r2", "1", "the part of the test targets' variance that the model explains: 1 is perfect, 0 their mean", "higher",
    word="R2",
)  # fmt: skip


class RegressionConfig(Config):
    name: str = "regression"


class Regression(Task):
    """Outputs and targets are numbers of the same shape [B, ...]; outputs [B, 1] go with targets [B], too."""

    Config: ClassVar[type[Config]] = RegressionConfig
    loss = "mse"
    metrics = (MSE, MAE, R2, LOSS)
    sums = ("squared_error", "absolute_error", "target", "squared_target")

    def align(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return (outputs[..., 0] if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1 else outputs), targets

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape != targets.shape or not targets.is_floating_point():
            raise needs("regression", "as many outputs as numbers in the targets", outputs, targets)

    def units(self, targets: Tensor) -> int | Tensor:
        return targets.numel()

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        wanted = targets.double()
        error = outputs.double() - wanted
        return {
            "squared_error": error.square().sum(), "absolute_error": error.abs().sum(),
            "target": wanted.sum(), "squared_target": wanted.square().sum(),
        }  # fmt: skip

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        count, wrong = sums["count"], sums["squared_error"]
        spread = sums["squared_target"] - sums["target"] ** 2 / count
        explained = {"r2": 1 - wrong / spread} if spread > 0 else {}  # else all targets are equal, such as a single one
        return {"mse": wrong / count, "mae": sums["absolute_error"] / count, **explained}
