"""The contract of training: the local work of one node between two exchanges."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from decentnode.config.component import Component
from decentnode.metrics.dealt import Dealt
from decentnode.tasks.base import EMA, Task, Variant
from decentnode.tensors import FlatModel

Direction = Callable[[Tensor], Tensor]
"""A rule's hook: flat gradient [P] -> flat direction [P] that the optimizer uses instead of it."""


@dataclass(frozen=True)
class Update:
    """The report of one round of local work. The model itself has been changed in place."""

    steps: int
    samples: int
    loss: float
    """Mean training loss over the round's samples."""
    report: dict[str, float] = field(default_factory=dict)
    """Further figures for metrics.jsonl, such as the gradient norm and the learning rate."""
    last_gradient: Tensor | None = None
    """[P] gradient of the last step, only when `keep_gradient` was asked for."""
    units: int | None = None
    """Parts that the mean loss is over: tokens, where the task has such. None: as many as samples."""
    parameters_sum: float | None = None
    """The sum of the parameters after all that changes them in the round, where `keep_sum` asks for it and it is
    known."""


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a model on some samples."""

    samples: int
    sums: Mapping[str, float]
    """By the names of `task.all_sums`; those of several shares of samples add up."""
    metrics: Mapping[str, float]
    """By the names of the task's metrics; empty without samples."""


@dataclass(frozen=True)
class EvaluatedSplit:
    """Test samples whose figures a run tells."""

    name: str = "test"
    """As `Training.evaluate` takes it."""
    prefix: str = ""
    """Before the names of its metrics."""
    shared: bool = True
    """Whether all nodes have the same samples."""
    pooled: bool = False
    """Whether figures over the nodes are those of all their samples together."""


class Training(Component, abc.ABC):
    """Owns the model, the data iterator, the optimizer and the learning-rate schedule of one node."""

    model: FlatModel
    task: Task
    num_samples: int
    evaluated: tuple[EvaluatedSplit, ...] = (EvaluatedSplit(),)
    """The first are the test samples."""
    keep_gradient: bool = False
    keep_sum: bool = False
    """Whether the sum of the parameters is wanted, which a GPU gives together with the loss."""
    members: tuple[int, ...] | None = None
    """The nodes among which all samples are dealt now; None: those of the run, as they were at its beginning."""
    dealt: Sequence[Dealt] = ()
    """What the node trained on in each generation for which samples were dealt, the present one last."""
    draws: bool = True
    """Whether steps may draw from torch's generator, which is then seeded in every round."""

    @classmethod
    def variants(cls, config: Any) -> tuple[Variant, ...]:  # noqa: ARG003
        """Returns what a training with this config measures beside its task's metrics."""
        return ()

    @abc.abstractmethod
    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        """Run the local steps of `round` in place on `model`.

        All randomness (order of samples, dropout) comes from (seed, uid, round), so that a round can be
        repeated. Raises Diverged when the loss is not finite.
        """

    def rest(self, round: int) -> None:
        """Called instead of `local_update` in a round without local steps. The order of samples stays where it is; a
        learning-rate schedule that follows the rounds goes on."""

    def took(self, seconds: float) -> None:
        """Called after `local_update` with how long it took. Training asks no clock itself."""

    def better(self, metric: str) -> Literal["higher", "lower"]:
        """Returns which values of a metric are better, also of one with a prefix; lower ones of what is none."""
        prefixes = ("", EMA.prefix, *(split.prefix for split in self.evaluated))
        return next((each.better for each in self.task.all_metrics
                     if any(metric == f"{prefix}{each.name}" for prefix in prefixes)), "lower")  # fmt: skip

    def finish_round(self) -> None:
        """Called when a round is over, with the mixed model in place."""

    def average(self) -> Tensor | None:
        """Returns a copy [P + B] (parameters, then float buffers) of the moving average of the models that is kept
        beside the model; None where none is."""
        return None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next local step, which sharing rules get as `RoundView.lr`; 1 for a training without
        one."""
        return 1.0

    @abc.abstractmethod
    def evaluate(self, split: str = "test", part: tuple[int, int] = (0, 1)) -> Evaluation:
        """Returns what the task measures of the present model on a split of `evaluated` or "validation". The model is
        unchanged.

        part: (index, count) evaluates every count-th sample from index on; no samples give sums of zero.
        """

    def measure_statistics(self) -> Tensor:
        """Float64 moments of what batch normalization sees when this node's training samples go through the model as it
        is now; the model is unchanged. They add up over nodes. Empty where there is nothing to measure."""
        return torch.zeros(0, dtype=torch.float64)

    def load_statistics(self, moments: Tensor) -> None:
        """Let the model's statistics be those of `moments`, in place; never called with empty ones."""
        raise NotImplementedError(f"{type(self).__name__} measures statistics but cannot load them")

    @property
    @abc.abstractmethod
    def has_validation(self) -> bool:
        """Whether there is a "validation" split."""

    @classmethod
    def deals(cls) -> bool:
        """Whether `deal_among` is there: whether nodes can take over the samples of others."""
        return cls.deal_among is not Training.deal_among

    def deal_among(self, members: tuple[int, ...], generation: int, first_round: int) -> None:
        """Let this node's samples be its own and its part of those of all nodes that are not `members`, from the
        beginning of an epoch that was never begun before: generation and first_round name it. The same on every node,
        whatever happened before."""
        raise NotImplementedError(f"{type(self).__name__} cannot take over samples of other nodes")

    def skip_to(self, round: int) -> None:
        """Let the learning-rate schedule and the order of samples be those before `round`, without training: for a node
        that comes to a run in that round. Does nothing for a training that has neither."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule and data position: what a resumed run needs besides the model."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
