"""Every task passes the contract; each metric is compared with an independent formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from decentnode.config.component import load_class
from decentnode.errors import UsageError
from decentnode.samples import PADDING, DataSpec
from decentnode.tasks import TASKS
from decentnode.tasks.base import Task
from tests.tasks.contract import Case, check_task, randint, randn, sums_of

SPECS = {
    "classification": DataSpec((3,), num_classes=7),
    "next_token": DataSpec((5,), "ids", "next_token", vocabulary=11, target_shape=(5,)),
    "rating": DataSpec((2,), "ids", "rating", users=3, items=4),
    "regression": DataSpec((3,), task="regression", target_shape=(2,)),
    "translation": DataSpec((5, 2), "ids", "translation", vocabulary=11, target_shape=(5,), padding=0, pairs=True),
}


def make_task(name: str, **keys: object) -> Task:
    found = load_class(name, TASKS, "task")
    made: Task = found(found.Config.model_validate({"name": name, **keys}), SPECS[name])
    return made


def padded(count: int) -> torch.Tensor:
    """Returns rows of tokens of unequal length, padded; none of them is empty."""
    tokens = randint(11, count, 5)
    return tokens.where(torch.arange(5) <= torch.arange(count)[:, None] % 5, PADDING)


CASES = {
    "classification": lambda: Case(
        make_task("classification"), lambda n: (randn(n, 7), randint(7, n)),
        lambda t: 20 * functional.one_hot(t, 7).float(),
        ((randn(4, 6), randint(7, 4)), (randn(4, 7), randn(4)), (randn(4, 7, 2), randint(7, 4)),
         (randn(3, 7), randint(7, 4))),
    ),
    "next_token": lambda: Case(
        make_task("next_token"), lambda n: (randn(n, 5, 11), padded(n)),
        lambda t: 20 * functional.one_hot(t.clamp(min=0), 11).float(),
        ((randn(4, 5, 10), randint(11, 4, 5)), (randn(4, 4, 11), randint(11, 4, 5)), (randn(4, 5, 11), randn(4, 5))),
    ),
    "rating": lambda: Case(
        make_task("rating"), lambda n: (randn(n, 1), randn(n) + 3), lambda t: t,
        ((randn(4, 2), randn(4)), (randn(4), randint(5, 4)), (randn(3), randn(4))),
    ),
    "translation": lambda: Case(
        make_task("translation", bleu=False), lambda n: (randn(n, 5, 11), padded(n)),
        lambda t: 20 * functional.one_hot(t.clamp(min=0), 11).float(),
        ((randn(4, 5, 10), randint(11, 4, 5)), (randn(4, 4, 11), randint(11, 4, 5)), (randn(4, 5, 11), randn(4, 5))),
    ),
    "regression": lambda: Case(
        make_task("regression"), lambda n: (randn(n, 2), 3 * randn(n, 2) + 100), lambda t: t,
        ((randn(4, 3), randn(4, 2)), (randn(4, 2), randint(5, 4, 2))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_contract(name: str) -> None:
    check_task(CASES[name]())


def test_top_k_accuracy_is_left_out_for_k_classes_or_fewer_and_counts_the_k_best() -> None:
    assert [each.name for each in make_task("classification").metrics] == ["accuracy", "top5_accuracy", "loss"]
    few = load_class("classification", TASKS, "task")
    names = [each.name for each in few(few.Config(), DataSpec((3,), num_classes=5)).metrics]
    assert names == ["accuracy", "loss"]
    outputs, targets = randn(50, 7), randint(7, 50)
    ranks = (outputs > outputs.gather(1, targets[:, None])).sum(1)
    task = make_task("classification", top_k=2)
    found = task.evaluated(sums_of(task, outputs, targets))
    assert found["top2_accuracy"] == pytest.approx(float((ranks < 2).float().mean()))
    nothing = task.evaluated(sums_of(task, torch.full((14, 7), math.nan), torch.arange(14) % 7))
    assert nothing["accuracy"] < 0.3 and nothing["top2_accuracy"] < 0.5


def test_metrics_of_next_token_are_those_of_the_mean_log_likelihood() -> None:
    task = make_task("next_token", characters_per_token=2.0)
    outputs, targets = randn(6, 5, 11), padded(6)
    found = task.evaluated(sums_of(task, outputs, targets))
    probabilities = outputs.double().softmax(2).numpy()
    chosen = [-math.log(probabilities[b, t, targets[b, t]]) for b in range(6) for t in range(5) if targets[b, t] >= 0]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(chosen)), rel=1e-5)
    assert found["bits_per_character"] == pytest.approx(np.mean(chosen) / math.log(2) / 2, rel=1e-5)
    assert found["loss"] == pytest.approx(np.mean(chosen), rel=1e-5)
    last = task.evaluated(sums_of(task, outputs[:, -1], randint(11, 6)))
    assert set(last) == {"perplexity", "bits_per_character", "accuracy", "loss"}, "the token behind each input alone"
    hopeless = {"loss": 1e6, "count": 1.0, "surprise": 1e6, "correct": 0.0}
    assert task.evaluated(hopeless)["perplexity"] == math.inf


def test_error_metrics_of_rating_and_regression() -> None:
    outputs, targets = randn(40) + 3, randn(41)[:40] + 3
    error = (outputs - targets).double().numpy()
    rating = make_task("rating")
    found = rating.evaluated(sums_of(rating, outputs, targets))
    assert found["rmse"] == pytest.approx(np.sqrt((error**2).mean()))
    assert found["mae"] == pytest.approx(abs(error).mean())
    regression = make_task("regression")
    found = regression.evaluated(sums_of(regression, outputs, targets))
    wanted = targets.double().numpy()
    assert found["mse"] == pytest.approx((error**2).mean())
    assert found["r2"] == pytest.approx(1 - (error**2).sum() / ((wanted - wanted.mean()) ** 2).sum())
    mean = regression.evaluated(sums_of(regression, targets.mean().expand(40, 1), targets))
    assert mean["r2"] == pytest.approx(0, abs=1e-5), "outputs [B, 1] go with targets [B]"


@pytest.mark.parametrize(("name", "data"), [("classification", SPECS["rating"]), ("next_token", SPECS["rating"]),
                                            ("translation", SPECS["next_token"])])
def test_data_of_another_task_is_refused(name: str, data: DataSpec) -> None:
    found = load_class(name, TASKS, "task")
    with pytest.raises(UsageError, match=f"task {name} needs data"):
        found(found.Config(), data)
