"""The table of losses, those of torch.nn by name and with their own arguments."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

from decentnode.training.arguments import ArgumentsConfig, check_arguments, class_named

CPU = torch.device("cpu")
LOSSES: dict[str, type[Any]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "nll": nn.NLLLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "smooth_l1": nn.SmoothL1Loss,
    "huber": nn.HuberLoss,
}
RESERVED = ("reduction", "size_average", "reduce", "weight")
"""Arguments that the training sets itself, and `weight`, which is a tensor and cannot be written in YAML."""


class LossConfig(ArgumentsConfig):
    """`{name: huber, delta: 0.5}`: further keys are the arguments of the torch.nn class."""

    name: str
    """cross_entropy (torch.nn.CrossEntropyLoss), nll, mse, l1, smooth_l1 or huber; or package.module:Class, whose
    instances return the mean loss of a batch for its outputs and targets."""

    @pydantic.model_validator(mode="after")
    def _known(self) -> LossConfig:
        found = class_named(self.name, LOSSES, "loss")
        check_arguments(self.name, found, self.arguments(), RESERVED, lambda given: found(**given))
        return self


class Loss:
    """The loss function: the mean over a batch for training, and the sum over a batch for evaluation."""

    def __init__(self, config: LossConfig, label_smoothing: float = 0.0, device: torch.device = CPU) -> None:
        """label_smoothing: label smoothing of the cross entropy in training; evaluation only has that of `config`.
        device: the device of outputs and targets."""
        kind: Any = class_named(config.name, LOSSES, "loss")

        def create(**overrides: Any) -> Any:
            found = kind(**{**config.arguments(), **overrides})
            return found.to(device) if isinstance(found, nn.Module) else found  # the loss may have tensors

        self.mean = create(**({"label_smoothing": label_smoothing} if label_smoothing else {}))
        # without the overhead of calling a module, a quarter of the time of a small batch's loss
        self.quick_mean = self.mean.forward if config.name in LOSSES else self.mean
        self._plain = create()
        self._summed = create(reduction="sum") if _can_sum(kind) else None

    def summed(self, outputs: Tensor, targets: Tensor, units: int | Tensor) -> Tensor:
        """Returns the loss of a batch summed over its `units`, a scalar."""
        if self._summed is not None:
            found: Tensor = self._summed(outputs, targets)
            return found
        mean: Tensor = self._plain(outputs, targets)
        return mean * units


@functools.cache
def _can_sum(loss_class: Any) -> bool:
    """Returns whether a loss class can sum over a batch (has `reduction`); other classes return the mean."""
    return "reduction" in inspect.signature(loss_class).parameters
