"""Checks for every task, among others that sums over any division of the samples give the metrics of the whole."""

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
    found = task.measure(*aligned)
    assert {*found} == {*task.sums} and all(each.ndim == 0 for each in found.values())
    of_loss = {"loss": float(loss.summed(*aligned, units)), "count": float(units)}
    return {**of_loss, **{name: float(value) for name, value in found.items()}}


def check_task(case: Case) -> None:
    check_metrics(case.task)
    check_shares_add_up(case)
    check_the_loss(case)
    check_better(case)
    check_refusals(case)


def check_metrics(task: Task) -> None:
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


def check_shares_add_up(case: Case) -> None:
    outputs, targets = case.draw(24)
    whole = sums_of(case.task, outputs, targets)
    cuts = ([24], [1, 23], [5, 0, 7, 12], [1] * 24)
    for cut in cuts:
        shares = zip(outputs.split(cut), targets.split(cut), strict=True)
        parts = [sums_of(case.task, *share) for share in shares if len(share[0])]
        added = {name: sum(part[name] for part in parts) for name in whole}
        assert added == pytest.approx(whole, rel=1e-5)
        assert case.task.evaluated(added) == pytest.approx(case.task.evaluated(whole), rel=1e-5, abs=1e-7)
    assert case.task.evaluated(dict.fromkeys(whole, 0.0)) == {}


def check_the_loss(case: Case) -> None:
    """Checks that the training loss is the mean loss that is evaluated."""
    outputs, targets = case.draw(16)
    mean = Loss(LossConfig(name=case.task.loss)).mean(*case.task.align(outputs, targets))
    found = case.task.evaluated(sums_of(case.task, outputs, targets))["loss"]
    assert found == pytest.approx(float(mean), rel=1e-5)


def check_better(case: Case) -> None:
    """Checks that a perfect model is better than a random one in every metric, as the metric's `better` defines it."""
    outputs, targets = case.draw(32)
    worse = case.task.evaluated(sums_of(case.task, outputs, targets))
    best = case.task.evaluated(sums_of(case.task, case.perfect(targets), targets))
    for metric in case.task.measured().metrics:
        sign = 1 if metric.better == "higher" else -1
        assert sign * best[metric.name] > sign * worse[metric.name], metric.name
        assert math.isfinite(worse[metric.name])


def check_refusals(case: Case) -> None:
    for outputs, targets in case.refused:
        with pytest.raises(UsageError, match=f"task {case.task.config.name} needs .*; the model gives "):
            case.task.check(*case.task.align(outputs, targets))
    outputs, targets = (each.to("meta") for each in case.draw(2))
    case.task.check(*case.task.align(outputs, targets))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1 + sum(shape)))
