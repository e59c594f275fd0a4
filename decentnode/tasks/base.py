"""The contract of a task: what batches contain, which loss is minimized and which metrics are measured."""

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
    """A variant of the task's metrics that is measured in addition: on other samples, or of another model."""

    prefix: str
    """The prefix of the metrics' names."""
    word: str
    """The word put in front of a metric's displayed name."""
    meaning: str
    """The text appended to a metric's explanation."""
    samples: str = "test"
    """The kind of samples that are measured, as plots name it."""
    of_test: bool = False
    """Whether another model is measured on the same test samples."""


OWN = Variant("own_", "own", ", of those that are distributed as the node's training samples")
"""Metrics on a node's own test samples, if there are global test samples as well."""
TRAIN = Variant("train_", "training", ", of the node's training samples in place of test samples", samples="")
EMA = Variant("ema_", "EMA", ", of the exponential moving average of the node's models", of_test=True)
LOSS_SUMS = ("loss", "count")
"""The names of the sums for the loss: the sum of the losses of all units, and the number of units."""


class Task(Component, abc.ABC):
    """Defines what is learned from batches of inputs and targets.

    Every metric is a function of sums over test samples. Sums over several batches, or over several nodes' parts of the
    test set, are added, and the metric is computed once from the total sums. So the metric over all samples is exact,
    also if it is not linear (a root of a mean, a perplexity).
    """

    loss: str = "cross_entropy"
    """The loss that is used if `training.loss` is not set."""
    metrics: tuple[Metric, ...] = (LOSS,)
    """The metrics that are measured. The first is the main metric."""
    sums: tuple[str, ...] = ()
    """The names of the sums that `measure` returns."""
    generated_sums: tuple[str, ...] = ()
    """The names of the sums that `measure_generated` returns."""

    def __init__(self, config: Config, data: DataSpec) -> None:
        """Raises UsageError if the data does not suit this task."""
        self.config = config
        self.data = data

    def align(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs and targets of a batch in the shapes that the loss and `measure` expect, without copying
        values."""
        return outputs, targets

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises UsageError if a batch, as `align` returns it, has shapes or dtypes that this task does not accept.
        Does not read values, so that tensors may be on the meta device."""

    def units(self, targets: Tensor) -> int | Tensor:
        """Returns the number of units over which the mean loss of a batch is taken: samples, or tokens. targets: the
        batch's targets before `align`. Does not wait for their device."""
        return len(targets)

    def parts(self, targets: Tensor) -> Tensor | None:  # noqa: ARG002
        """Returns the number of `units` of each sample, [B]; None if all samples have equally many. Private training
        and simulations that compute all nodes at once need it if `units` returns a tensor. Does not wait for the
        targets' device."""
        return None

    @abc.abstractmethod
    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns name -> sum over one batch, which is passed as `align` returns it; sums are scalars on its device.
        Called without autograd."""

    def measure_generated(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Returns name -> sum over one batch, for figures that need more than one forward pass of the module, such as
        generated texts. Called if `generated_sums` has names. inputs, targets: the batch before `align`."""
        raise NotImplementedError(f"task {self.config.name} cannot generate texts")

    @abc.abstractmethod
    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics by name, without those that these samples do not define. sums: the total sums over all
        evaluated samples, with the names of `all_sums`; `count` is positive."""

    @property
    def all_sums(self) -> tuple[str, ...]:
        return (*LOSS_SUMS, *self.sums, *self.generated_sums)

    def evaluated(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns all metrics including the loss; empty if `count` is not positive."""
        if sums["count"] <= 0:
            return {}
        return {**self.values(sums), "loss": sums["loss"] / sums["count"]}

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        """The task's metrics and the loss."""
        return self.metrics if any(each.name == "loss" for each in self.metrics) else (*self.metrics, LOSS)

    def measured(self, pooled: bool = False, variants: Sequence[Variant] = ()) -> TaskMetrics:
        """Returns the descriptions of all metrics that runs of this task report.

        pooled: whether every node only has its own part of the test set. variants: the variants that are measured in
        addition.
        """
        found = [replace(each, pooled=pooled) for each in self.all_metrics]
        for also in variants:
            found += [replace(each, name=f"{also.prefix}{each.name}", word=f"{also.word} {each.text}", short="",
                              meaning=f"{each.meaning}{also.meaning}", samples=also.samples,
                              pooled=pooled and also.of_test) for each in self.all_metrics]  # fmt: skip
        return TaskMetrics(self.config.name, tuple(found))


def needs(task: str, what: str, outputs: Tensor, targets: Tensor) -> UsageError:
    """Returns the error for a batch that a task does not accept."""
    return UsageError(
        f"task {task} needs {what}; the model gives {shape_of(outputs)} for targets {shape_of(targets)}"
    )


def shape_of(tensor: Tensor) -> str:
    """Returns the shape and dtype of a tensor as text: "[2, 10] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
