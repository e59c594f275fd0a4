"""Checks for every task, among others that metrics do not depend on how the samples are divided into batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from decentnode.errors import UsageError
from decentnode.metrics.figures import TaskMetrics
from decentnode.tasks.base import LOSS_SUMS, Task
from decentnode.training.losses import Loss, LossConfig


@dataclass(frozen=True)
class Case:
    """A task with batches that it accepts and batches that it refuses."""

    task: Task
    draw: Callable[[int], tuple[Tensor, Tensor]]
    """Number of samples -> (outputs of a model, targets)."""
    perfect: Callable[[Tensor], Tensor]
    """Targets -> the best possible outputs."""
    refused: tuple[tuple[Tensor, Tensor], ...]


def sums_of(task: Task, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Returns the sums of one batch as training computes them."""
    loss = Loss(LossConfig(name=task.loss))
    units = task.units(targets)
    aligned = task.align(outputs, targets)
    task.check(*aligned)
    measured = task.measure(*aligned)
    assert {*measured} == {*task.sums} and all(value.ndim == 0 for value in measured.values())
    loss_sums = {"loss": float(loss.summed(*aligned, units)), "count": float(units)}
    return {**loss_sums, **{name: float(value) for name, value in measured.items()}}


def check_task(case: Case) -> None:
    check_metrics_are_described(case.task)
    check_sums_of_batches_add_up(case)
    check_evaluated_loss_is_the_training_loss(case)
    check_perfect_outputs_are_better(case)
    check_invalid_batches_are_refused(case)


def check_metrics_are_described(task: Task) -> None:
    measured = task.measured()
    names = [each.name for each in measured.metrics]
    assert len(set(names)) == len(names) and "loss" in names
    assert all(each.unit and each.meaning and each.better in ("higher", "lower") for each in measured.metrics)
    assert TaskMetrics.from_plain(measured.plain()) == measured
    figures = [each.name for each in measured.figures]
    assert len(set(figures)) == len(figures) and {*measured.compared} <= {*figures}
    assert {f"{name}_{which}" for name in names for which in ("mean", "min", "max", "merged")} <= {*figures}
    titles = [each.title for each in measured.figures]
    assert len(set(titles)) == len(titles)
    assert task.all_sums[:2] == LOSS_SUMS


def check_sums_of_batches_add_up(case: Case) -> None:
    """Checks that sums over batches of any sizes add up to the sums over all samples, and that of no samples nothing is
    evaluated."""
    outputs, targets = case.draw(24)
    whole = sums_of(case.task, outputs, targets)
    for sizes in ([24], [1, 23], [5, 0, 7, 12], [1] * 24):
        batches = zip(outputs.split(sizes), targets.split(sizes), strict=True)
        parts = [sums_of(case.task, *batch) for batch in batches if len(batch[0])]
        added = {name: sum(part[name] for part in parts) for name in whole}
        assert added == pytest.approx(whole, rel=1e-5)
        assert case.task.evaluated(added) == pytest.approx(case.task.evaluated(whole), rel=1e-5, abs=1e-7)
    assert case.task.evaluated(dict.fromkeys(whole, 0.0)) == {}


def check_evaluated_loss_is_the_training_loss(case: Case) -> None:
    """Checks that the training loss is the mean loss that is evaluated."""
    outputs, targets = case.draw(16)
    mean = Loss(LossConfig(name=case.task.loss)).mean(*case.task.align(outputs, targets))
    evaluated = case.task.evaluated(sums_of(case.task, outputs, targets))["loss"]
    assert evaluated == pytest.approx(float(mean), rel=1e-5)


def check_perfect_outputs_are_better(case: Case) -> None:
    """Checks that a perfect model is better than a random one in every metric, as the metric's `better` defines it."""
    outputs, targets = case.draw(32)
    worse = case.task.evaluated(sums_of(case.task, outputs, targets))
    best = case.task.evaluated(sums_of(case.task, case.perfect(targets), targets))
    for metric in case.task.measured().metrics:
        sign = 1 if metric.better == "higher" else -1
        assert sign * best[metric.name] > sign * worse[metric.name], metric.name
        assert math.isfinite(worse[metric.name])


def check_invalid_batches_are_refused(case: Case) -> None:
    """Checks also that valid batches are accepted on the meta device, where tensors have no values."""
    for outputs, targets in case.refused:
        with pytest.raises(UsageError, match=f"task {case.task.config.name} needs .*; the model gives "):
            case.task.check(*case.task.align(outputs, targets))
    outputs, targets = (each.to("meta") for each in case.draw(2))
    case.task.check(*case.task.align(outputs, targets))


def randn(*shape: int) -> Tensor:
    """Returns normal draws; the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def randint(high: int, *shape: int) -> Tensor:
    """Returns integers from 0 to high - 1; the same in every call."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1 + sum(shape)))
