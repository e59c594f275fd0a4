"""The contract of a task: what a batch is, what is minimized and what is measured."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from decentnode.config.component import Component, Config
from decentnode.errors import UsageError
from decentnode.metrics.figures import LOSS, Metric, TaskMetrics
from decentnode.samples import DataSpec

if TYPE_CHECKING:
    from torch import Tensor, nn



@dataclass(frozen=True)
class Variant:
    """Metrics that are measured beside those of a node's model on the test samples."""

    prefix: str
    """Before their names."""
    word: str
    """Before what people read."""
    meaning: str
    """Behind what a metric means."""
    samples: str = "test"
    """What they are measured on, as plots say it."""
    of_test: bool = False
    """Whether they are measured on the same samples, of another model."""


OWN = Variant("own_", "own", ", of those that are distributed as the node's training samples")
"""Of a node's own test samples, where there are global ones, too."""
TRAIN = Variant("train_", "training", ", of the node's training samples in place of test samples", samples="")
EMA = Variant("ema_", "EMA", ", of the exponential moving average of the node's models", of_test=True)
LOSS_SUMS = ("loss", "count")
"""What is summed for the loss: the losses of all units, and how many units there are."""


class Task(Component, abc.ABC):
    """Says what is learned from batches of inputs and targets.

    Everything that is measured of a model is a function of sums over its test samples. Sums of several batches, of
    several nodes' shares and of the merged model add up, so that a metric of the whole is exact, whatever it is (a
    root of a mean, a perplexity): it is computed once, from the whole's sums.
    """

    loss: str = "cross_entropy"
    """The loss where `training.loss` names none."""
    metrics: tuple[Metric, ...] = (LOSS,)
    """What is measured. The first is the main metric."""
    sums: tuple[str, ...] = ()
    """Names of the sums that `measure` gives."""
    generated_sums: tuple[str, ...] = ()
    """Names of the sums that `measure_generated` gives."""

    def __init__(self, config: Config, data: DataSpec) -> None:
        """Raises UsageError where the data is not for this task."""
        self.config = config
        self.data = data

    def align(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs and targets of a batch as the loss and `measure` take them, without copying values."""
        return outputs, targets

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises UsageError where a batch, as `align` returns it, has shapes that this task cannot take. Of tensors on
        the meta device, too: values are not looked at."""

    def units(self, targets: Tensor) -> int | Tensor:
        """Returns how many parts the mean loss of a batch is over: samples, or tokens. targets: of the batch as they
        come; nothing waits for their device."""
        return len(targets)

    def parts(self, targets: Tensor) -> Tensor | None:  # noqa: ARG002
        """Returns how many of `units` each sample has, [B]; None where each sample is one. Simulations that compute all
        nodes at once need it where `units` gives a tensor. Nothing waits for the targets' device."""
        return None

    @abc.abstractmethod
    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns by name the sums of one batch, as `align` returns it: scalars on its device. Not differentiated."""

    def measure_generated(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns by name the sums of what the module makes of one batch by more than one forward pass; called where
        `generated_sums` has names. inputs, targets: as they come."""
        raise NotImplementedError(f"task {self.config.name} cannot generate texts")

    @abc.abstractmethod
    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics by name. sums: those of `sums`, "loss" and "count", over all that is to be judged; count
        is positive."""

    @property
    def all_sums(self) -> tuple[str, ...]:
        return (*LOSS_SUMS, *self.sums, *self.generated_sums)

    def evaluated(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns all metrics, the loss among them; empty where nothing was counted."""
        if sums["count"] <= 0:
            return {}
        return {**self.values(sums), "loss": sums["loss"] / sums["count"]}

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        """The task's metrics and the loss."""
        return self.metrics if any(each.name == "loss" for each in self.metrics) else (*self.metrics, LOSS)

    def measured(self, pooled: bool = False, variants: Sequence[Variant] = ()) -> TaskMetrics:
        """Returns what runs of this task tell of themselves.

        pooled: whether every node has a part of the test set alone. variants: what is measured beside.
        """
        found = [replace(each, pooled=pooled) for each in self.all_metrics]
        for also in variants:
            found += [replace(each, name=f"{also.prefix}{each.name}", word=f"{also.word} {each.text}", short="",
                              meaning=f"{each.meaning}{also.meaning}", samples=also.samples,
                              pooled=pooled and also.of_test) for each in self.all_metrics]  # fmt: skip
        return TaskMetrics(self.config.name, tuple(found))


def needs(task: str, what: str, outputs: Tensor, targets: Tensor) -> UsageError:
    """Returns the error of a batch that a task cannot take."""
    return UsageError(
        f"task {task} needs {what}; the model gives {shape_of(outputs)} for targets {shape_of(targets)}"
    )


def shape_of(tensor: Tensor) -> str:
    """Returns the shape and dtype of a tensor for people: "[2, 10] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
