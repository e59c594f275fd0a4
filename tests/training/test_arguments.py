"""Every numeric argument of optimizers and schedules: an extreme value is refused by the config, or torch steps."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
import torch
from torch import nn

from decentnode.errors import Diverged
from decentnode.training.lr_schedules import LR_SCHEDULES, LearningRateSchedule, ScheduleConfig
from decentnode.training.optimizers import OptimizerConfig, _optimizers, make_optimizer

FLOAT32 = 3.4e38
EXTREMES = (FLOAT32, -FLOAT32, 1e30, 1e9, 10**9, 10**15, 10**30, 1e-300, 1e-45, 0.0, 0.9999999999999999)
BEYOND_FLOAT32 = (3.5e38, -1e300, 10**39, -(10**300))
REFUSED = re.compile("must be within float32, from -3.4e38 to 3.4e38")
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"T_max": 5}, "cosine_warm_restarts": {"T_0": 3}, "cyclic": {"base_lr": 0.01, "max_lr": 0.1},
    "exponential": {"gamma": 0.9}, "multistep": {"milestones": [2]}, "one_cycle": {"max_lr": 0.1, "total_steps": 9},
    "step": {"step_size": 1},
}  # fmt: skip


def numeric_arguments(of: Any) -> Iterator[tuple[str, int]]:
    """Yields (name, length of the tuple, or 0 for a single number) of the numeric arguments of a class."""
    for key, parameter in inspect.signature(of).parameters.items():
        default = parameter.default
        if isinstance(default, tuple):
            yield key, len(default)
        elif key in ("lr", "gamma", "base_lr", "max_lr") or (type(default) in (int, float) and key != "last_epoch"):
            yield key, 0


@pytest.mark.parametrize("name", sorted(_optimizers()))
def test_every_number_of_an_optimizer_is_refused_or_steps(name: str) -> None:
    """Three steps each, with gradients of one, of zero, and beyond what float32 can square."""
    for key, count in numeric_arguments(_optimizers()[name]):
        for value in (*EXTREMES, *BEYOND_FLOAT32):
            section = {"name": name, "lr": 0.1, key: [value] * count if count else value}
            try:
                config = OptimizerConfig.model_validate(section)
            except pydantic.ValidationError as error:
                assert value not in BEYOND_FLOAT32 or REFUSED.search(str(error)), section
                continue
            assert value not in BEYOND_FLOAT32, section
            parameter = nn.Parameter(torch.ones(2, 3))
            optimizer = make_optimizer(config, [parameter])
            for gradient in (1.0, 0.0, 1e30):
                parameter.grad = torch.full_like(parameter, gradient)
                optimizer.step()


@pytest.mark.parametrize("name", sorted(LR_SCHEDULES))
def test_every_number_of_a_schedule_is_refused_or_ticks(name: str) -> None:
    for (key, _), value in itertools.product(numeric_arguments(LR_SCHEDULES[name]), (*EXTREMES, *BEYOND_FLOAT32)):
        section = {"name": name, **SCHEDULES.get(name, {}), key: value}
        try:
            config = ScheduleConfig.model_validate(section)
        except pydantic.ValidationError as error:
            assert value not in BEYOND_FLOAT32 or REFUSED.search(str(error)), section
            continue
        assert value not in BEYOND_FLOAT32, section
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
        try:
            schedule = LearningRateSchedule(config, optimizer)
            for _ in range(8):
                schedule.tick()
                assert abs(optimizer.param_groups[0]["lr"]) <= 3.41e38
        except Diverged as error:
            assert "the learning rate is" in str(error) and f"training.lr_schedule {name}" in str(error)


def test_a_learning_rate_beyond_float32_raises_diverged() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    schedule = LearningRateSchedule(ScheduleConfig.model_validate({"name": "exponential", "gamma": 1e20}), optimizer)
    schedule.tick()
    with pytest.raises(Diverged, match=r"the learning rate is 1e\+39 after 2 rounds; choose other values of training"):
        schedule.tick()
