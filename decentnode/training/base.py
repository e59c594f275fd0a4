"""The contract of training: the local work of one node between two exchanges."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from decentnode.config.component import Component
from decentnode.metrics.figures import Metric
from decentnode.metrics.generation_samples import GenerationSamples
from decentnode.tasks.base import EMA, Task, Variant
from decentnode.tensors import FlatModel

Direction = Callable[[Tensor], Tensor]
"""A sharing rule's hook: maps the flat gradient [P] to the flat direction [P] that the optimizer uses instead."""


@dataclass(frozen=True)
class Update:
    """The result of one round of local steps, beside the model, which is changed in place."""

    steps: int
    samples: int
    loss: float
    """Mean training loss over the round's samples."""
    report: dict[str, float] = field(default_factory=dict)
    """Further figures for metrics.jsonl, such as the gradient norm and the learning rate."""
    last_gradient: Tensor | None = None
    """[P] gradient of the last step, only if `keep_gradient` is set."""
    units: int | None = None
    """The number of units over which the loss is averaged, such as tokens. None: the number of samples."""
    parameters_sum: float | None = None
    """The sum of all parameters after the local steps, if `keep_sum` is set and the training computed it."""


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a model on some samples."""

    samples: int
    sums: Mapping[str, float]
    """name -> sum, for the names of `task.all_sums`; sums over several parts of the samples can be added."""
    metrics: Mapping[str, float]
    """name -> value of the task's metrics; empty if there were no samples."""


@dataclass(frozen=True)
class EvaluatedSplit:
    """A set of samples on which a run evaluates models and reports the figures."""

    name: str = "test"
    """The split's name, as passed to `Training.evaluate`."""
    prefix: str = ""
    """The prefix of the metrics' names."""
    shared: bool = True
    """Whether all nodes have the same samples."""
    pooled: bool = False
    """Whether figures over all nodes are computed from all their samples together, instead of averaging the nodes'
    figures."""


class Training(Component, abc.ABC):
    """Owns the model, the data iterator, the optimizer and the learning-rate schedule of one node."""

    model: FlatModel
    task: Task
    num_samples: int
    evaluated: tuple[EvaluatedSplit, ...] = (EvaluatedSplit(),)
    """The splits that evaluations measure, the test samples first."""
    further: tuple[Metric, ...] = ()
    """The metrics that `measure_further` measures: `further_metrics` of the training's config."""
    keep_gradient: bool = False
    keep_sum: bool = False
    """Whether `local_update` is to return the sum of the parameters, which can be copied from a GPU together with the
    loss."""
    members: tuple[int, ...] | None = None
    """The nodes among which all samples are dealt now; None: all nodes of the run, as at its beginning."""
    dealt: Sequence[GenerationSamples] = ()
    """What the node trained on in each generation for which samples were dealt, the current generation last."""
    draws: bool = True
    """Whether local steps may draw from torch's generator, which is then seeded in every round."""

    @classmethod
    def variants(cls, config: Any) -> tuple[Variant, ...]:  # noqa: ARG003
        """Returns the variants of the task's metrics that a training with this config measures in addition."""
        return ()

    @classmethod
    def further_metrics(cls, config: Any) -> tuple[Metric, ...]:  # noqa: ARG003
        """Returns the metrics that a training with this config measures by itself (`measure_further`), in addition to
        the task's."""
        return ()

    def measure_further(self, merged: bool = False) -> dict[str, float]:  # noqa: ARG002
        """Returns the values of `further_metrics` for the current model, without those that it has no value of. merged:
        whether this is the mean of all models, not the node's own."""
        return {}

    @abc.abstractmethod
    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        """Run the local steps of `round`, which change `model` in place.

        All randomness (order of samples, dropout) is derived from (seed, uid, round), so that a round can be repeated.
        Raises Diverged if the loss is not finite.
        """

    def rest(self, round: int) -> None:
        """Called instead of `local_update` in a round without local steps. The position in the order of samples stays
        unchanged; a learning-rate schedule that counts rounds advances."""

    def took(self, seconds: float) -> None:
        """Called after `local_update` with the seconds that it took. Training itself does not read a clock."""

    def better(self, metric: str) -> Literal["higher", "lower"]:
        """Returns which values of a metric (with or without a prefix) are better; "lower" if there is no such
        metric."""
        prefixes = ("", EMA.prefix, *(split.prefix for split in self.evaluated))
        return next((each.better for each in self.task.all_metrics
                     if any(metric == f"{prefix}{each.name}" for prefix in prefixes)), "lower")  # fmt: skip

    def finish_round(self) -> None:
        """Called at the end of a round, when the model has been mixed."""

    def average(self) -> Tensor | None:
        """Returns a copy [P + B] (parameters, then float buffers) of the moving average of this node's models; None if
        none is kept."""
        return None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next local step, which sharing rules get as `RoundView.lr`; 1 for a training that
        has no learning rate."""
        return 1.0

    @abc.abstractmethod
    def evaluate(self, split: str = "test", part: tuple[int, int] = (0, 1)) -> Evaluation:
        """Returns what the task measures of the current model on a split of `evaluated` or on "validation". The model
        is not changed.

        part: (index, count) evaluates every count-th sample from index on. Without samples, all sums are zero.
        """

    def measure_statistics(self) -> Tensor:
        """Returns the float64 moments of the inputs of all batch normalization layers when the current model processes
        this node's training samples. The moments of several nodes can be added; they are empty if there is nothing to
        measure. The model is not changed."""
        return torch.zeros(0, dtype=torch.float64)

    def load_statistics(self, moments: Tensor) -> None:
        """Set the model's statistics from `moments`, in place; never called with empty moments."""
        raise NotImplementedError(f"{type(self).__name__} measures statistics but cannot load them")

    @property
    @abc.abstractmethod
    def has_validation(self) -> bool:
        """Whether there is a "validation" split."""

    @classmethod
    def deals(cls) -> bool:
        """Returns whether the class implements `deal_among`, so that nodes can take over the samples of others."""
        return cls.deal_among is not Training.deal_among

    def deal_among(self, members: tuple[int, ...], generation: int, first_round: int) -> None:
        """Set this node's samples to its own ones and its part of the samples of all nodes that are not `members`, and
        begin a new epoch, whose order of samples depends on `generation` and `first_round`. The result depends only on
        the arguments, not on earlier calls, so that it is consistent on all nodes."""
        raise NotImplementedError(f"{type(self).__name__} cannot take over samples of other nodes")

    def skip_to(self, round: int, trains_in: Callable[[int], bool] = lambda _round: True) -> None:
        """Set the learning-rate schedule and the position in the order of samples to those before `round` without
        training, for a node that joins a run in that round. Does nothing for a training that has neither.

        trains_in: returns whether the node makes local steps in a round; not given if it does in all."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs besides the model: the state of the optimizer, the learning-rate schedule
        and the position in the data."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
