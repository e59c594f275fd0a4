"""One of several classes for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from decentnode.config.component import Config
from decentnode.errors import UsageError
from decentnode.metrics.figures import ACCURACY, LOSS, Metric
from decentnode.samples import DataSpec
from decentnode.tasks.base import Task, needs

if TYPE_CHECKING:
    from torch import Tensor


class ClassificationConfig(Config):
    name: str = "classification"
    top_k: int = Field(5, ge=2)
    """Also measure how often the right class is among this many of the likeliest classes. Left out if the data has no
    more classes than that."""


class Classification(Task):
    """Outputs [B, C] are a value per class, targets [B] the numbers of the right classes."""

    Config: ClassVar[type[Config]] = ClassificationConfig
    loss = "cross_entropy"

    def __init__(self, config: ClassificationConfig, data: DataSpec) -> None:
        super().__init__(config, data)
        if data.num_classes is None:
            raise UsageError("task classification needs data with classes; use the task that the data is for")
        k = self._k = config.top_k
        self._has_top = data.num_classes > k
        top = Metric(
            f"top{k}_accuracy", "fraction", f"of the test samples whose right class is among the {k} likeliest",
            "higher", word=f"top-{k} accuracy", suffix="%", scale=100, digits=2,
        )  # fmt: skip
        self.metrics = (ACCURACY, *([top] if self._has_top else []), LOSS)
        self.sums = ("correct", *(["among_top"] if self._has_top else []))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        classes = self.data.num_classes
        whole = not targets.is_floating_point() and targets.ndim == 1
        if outputs.ndim != 2 or not whole or len(outputs) != len(targets) or outputs.shape[1] != classes:
            raise needs("classification", f"outputs [batch, {classes}] and whole numbers [batch] as targets", outputs,
                        targets)  # fmt: skip

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found = {"correct": (outputs.argmax(1) == targets).sum()}
        # topk treats NaN as the largest value, so that a model with NaN outputs gets almost nothing right
        if self._has_top:
            likeliest = outputs.topk(self._k, dim=1).indices
            found["among_top"] = (likeliest == targets[:, None]).sum()
        return found

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = {"accuracy": sums["correct"] / sums["count"]}
        if self._has_top:
            found[f"top{self._k}_accuracy"] = sums["among_top"] / sums["count"]
        return found
