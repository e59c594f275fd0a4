"""Losses, optimizers and schedules of the user, by `package.module:Class`."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
import torch
from torch import Tensor, nn

from decentnode.training.supervised_config import SupervisedConfig
from tests.training.contract import check_resume, check_rounds
from tests.training.small import make


class FocalLoss(nn.Module):
    """A loss without the argument `reduction`, which returns the mean."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        likelihood = outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
        return -((1 - likelihood.exp()) ** self.gamma * likelihood).mean()


class LossWithoutConstructor(nn.Module):
    """Inherits the constructor of nn.Module, whose signature is (*args, **kwargs) but which takes no argument."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)


class SignSgd(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, decay: float = 0.0) -> None:
        if decay < 0:
            raise ValueError(f"decay must be at least 0, got {decay}")
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad.sign() + group["decay"] * p))


class HalvingSchedule(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 2) -> None:
        self.ticks = every
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * 0.5 ** (self.last_epoch // self.ticks) for base in self.base_lrs]


OWN: dict[str, Any] = {
    "loss": {"name": f"{__name__}:FocalLoss", "gamma": 1.0},
    "optimizer": {"name": f"{__name__}:SignSgd", "lr": 0.01},
    "lr_schedule": {"name": f"{__name__}:HalvingSchedule"},
}


def test_custom_loss_optimizer_and_schedule_train_repeat_and_resume() -> None:
    def make_custom(uid: int) -> Any:
        return make(uid, batch_size=4, local_steps=3, **OWN)

    check_rounds(make_custom)
    check_resume(make_custom)
    training = make_custom(0)
    rates = []
    for round in range(5):
        rates.append(training.learning_rate)
        training.local_update(round)
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025])


def test_a_custom_loss_is_evaluated_as_the_mean_over_samples() -> None:
    training = make(0, **OWN)
    source, members = training.share.splits["test"]
    inputs, targets = source.take(members)
    expected = float(FocalLoss(1.0)(training.model.module(inputs), targets).detach())
    assert training.evaluate("test").metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_custom_loss_may_inherit_the_constructor_of_module() -> None:
    make(0, batch_size=4, loss={"name": f"{__name__}:LossWithoutConstructor"}).local_update(0)


@pytest.mark.parametrize(("key", "value", "text"), [
    ("loss", {"name": f"{__name__}:FoclaLoss"}, "did you mean 'FocalLoss'"),
    ("loss", {"name": f"{__name__}:FocalLoss", "gama": 1}, "must be an argument of .*did you mean 'gamma'"),
    ("optimizer", {"name": f"{__name__}:FocalLoss"}, r"must name a class derived from torch\.optim"),
    ("optimizer", {"name": f"{__name__}:SignSgd"}, "needs 'lr' beside it"),
    ("optimizer", {"name": f"{__name__}:SignSgd", "lr": 0.1, "decay": -1}, "decay must be at least 0, got -1"),
    ("optimizer", {"name": "sgd", "lr": float("nan")}, "must be a finite number, got nan"),
    ("lr_schedule", {"name": "step", "step_size": 3, "gamma": float("inf")}, "must be a finite number, got inf"),
    ("optimizer", {"name": "nowhere_such:SignSgd"}, "no module named 'nowhere_such'"),
    ("lr_schedule", {"name": f"{__name__}:SignSgd"}, r"must name a class derived from torch\.optim\.lr_scheduler"),
])  # fmt: skip
def test_wrong_names_and_arguments_of_custom_classes_are_refused(key: str, value: dict[str, Any], text: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=text):
        SupervisedConfig.model_validate({"batch_size": 4, key: value})
