"""The table of learning-rate schedules, those of torch.optim.lr_scheduler by name and with their own arguments, each
with an optional warm-up."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import pydantic
import torch
from pydantic import Field
from torch.optim import lr_scheduler

from decentnode.config.component import FLOAT32
from decentnode.errors import Diverged
from decentnode.training.arguments import ArgumentsConfig, check_arguments, class_named
from decentnode.training.optimizers import trial


class _Constant:
    """The schedule that keeps the optimizer's learning rate constant."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing, so that the optimizer keeps its learning rate."""

    def step(self) -> None:
        """Does nothing, as the learning rate never changes."""


LR_SCHEDULES: dict[str, type[Any]] = {
    "constant": _Constant,
    "cosine": lr_scheduler.CosineAnnealingLR,
    "cosine_warm_restarts": lr_scheduler.CosineAnnealingWarmRestarts,
    "cyclic": lr_scheduler.CyclicLR,
    "exponential": lr_scheduler.ExponentialLR,
    "linear": lr_scheduler.LinearLR,
    "multistep": lr_scheduler.MultiStepLR,
    "one_cycle": lr_scheduler.OneCycleLR,
    "polynomial": lr_scheduler.PolynomialLR,
    "step": lr_scheduler.StepLR,
}
RESERVED = ("optimizer", "last_epoch", "verbose", "scale_fn")


def _check_with_trial_tick(cls: type[Any], arguments: dict[str, Any]) -> None:
    """Construct the schedule and tick once, as torch checks some arguments only in a tick."""
    schedule = cls(trial(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.step()


def _class_of(name: str) -> type[Any]:
    return class_named(name, LR_SCHEDULES, "lr_schedule", lr_scheduler.LRScheduler)


class ScheduleConfig(ArgumentsConfig):
    """`{name: cosine, T_max: 60}`: further keys are the arguments of the torch.optim.lr_scheduler class."""

    name: str = "constant"
    """constant, cosine (CosineAnnealingLR), cosine_warm_restarts, cyclic, exponential, linear, multistep,
    one_cycle, polynomial or step; or package.module:Class, derived from torch's LRScheduler."""
    every: Literal["round", "step"] = "round"
    """What one tick of the schedule is: a round (all its local steps have one learning rate) or an optimizer step. All
    lengths (T_max, step_size, milestones, warmup ...) count ticks."""
    warmup: int = Field(0, ge=0)
    """Ticks over which the learning rate grows linearly to its first value, before the schedule starts."""
    warmup_factor: float = Field(0.1, ge=0, le=1)
    """Learning rate in the first tick of the warm-up, as a fraction of its first value."""

    @pydantic.model_validator(mode="after")
    def _known(self) -> ScheduleConfig:
        found = _class_of(self.name)
        check_arguments(
            self.name, found, self.arguments(), RESERVED, lambda given: _check_with_trial_tick(found, given)
        )
        return self

    def most_ticks(self) -> int | None:
        """Returns how many ticks the schedule has (one_cycle's total_steps); None if there is no limit."""
        length = LearningRateSchedule(self, trial(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})).length
        return None if length is None else self.warmup + length


class LearningRateSchedule:
    """Sets the learning rates of an optimizer. The number of ticks is its whole state."""

    def __init__(self, config: ScheduleConfig, optimizer: torch.optim.Optimizer) -> None:
        self.ticks = 0
        self._config = config
        self._optimizer = optimizer
        self._initial = [group["lr"] for group in optimizer.param_groups]
        self._start()

    def _start(self) -> None:
        groups = self._optimizer.param_groups
        for group, initial in zip(groups, self._initial, strict=True):
            group["lr"] = initial
            group.pop("initial_lr", None)  # set by an earlier schedule; torch would start from it
        found, arguments = _class_of(self._config.name), self._config.arguments()
        with warnings.catch_warnings():
            # torch warns if a schedule ticks before the first optimizer step, as it does after a resume, and about a
            # step method that an earlier schedule has wrapped.
            warnings.simplefilter("ignore")
            self._torch_schedule = found(self._optimizer, **arguments)
        self.length: int | None = getattr(self._torch_schedule, "total_steps", None)
        self._peaks = [group["lr"] for group in groups]
        self.ticks = 0
        self._apply_warmup()

    def _apply_warmup(self) -> None:
        warmup, factor = self._config.warmup, self._config.warmup_factor
        if self.ticks <= warmup and warmup:
            part = factor + (1 - factor) * self.ticks / warmup
            for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * part if self.ticks < warmup else peak

    def tick(self) -> None:
        """Set the next learning rate; keeps the last one of a schedule that has ended, as a client may take part in
        more rounds than expected once others are lost. Raises Diverged if it exceeds the range of float32."""
        self.ticks += 1
        self._apply_warmup()
        ticks = self.ticks - self._config.warmup
        if ticks > 0 and (self.length is None or ticks < self.length):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    self._torch_schedule.step()
                except ArithmeticError as error:
                    raise self._diverged(str(error)) from error
        for group in self._optimizer.param_groups:
            if not abs(group["lr"]) <= FLOAT32:
                raise self._diverged(f"{float(group['lr']):g}")

    def _diverged(self, what: str) -> Diverged:
        return Diverged(f"the learning rate is {what} after {self.ticks} {self._config.every}s; choose other values of "
                        f"training.lr_schedule {self._config.name}")  # fmt: skip

    def restore(self, ticks: int) -> None:
        """Start again and tick `ticks` times, which gives bit for bit the learning rates of an uninterrupted
        schedule."""
        self._start()
        for _ in range(ticks):
            self.tick()
