"""Differentially private training of the tasks whose targets are numbers: regression and rating."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from decentnode.config.component import load_class
from decentnode.experiment import load
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.models.matrix_factorization import MatrixFactorizationConfig, MatrixFactorizationModule
from decentnode.samples import DataSpec, NodeSamples, Samples
from decentnode.tasks import TASKS
from decentnode.tensors import FlatModel
from decentnode.training.privacy import epsilon_of
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig
from tests.data.files import write_movielens

from .contract import check_training
from .test_privacy import NO_NOISE, needs_opacus

WAVES = Path(__file__).parents[2] / "configs" / "own" / "waves.yaml"
COUNT, USERS, ITEMS = 20, 5, 7


def numbers(columns: int, seed: int = 0) -> Samples:
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(COUNT, 3)).astype(np.float32)
    targets = draw.normal(size=(COUNT, columns) if columns > 1 else COUNT).astype(np.float32)
    return Samples(inputs, targets + inputs.sum(1).reshape(targets.shape[:1] + (1,) * (targets.ndim - 1)))


def ratings(seed: int = 0) -> Samples:
    draw = np.random.default_rng(seed)
    pairs = np.stack([draw.integers(0, USERS, COUNT), draw.integers(0, ITEMS, COUNT)], 1)
    return Samples(pairs, draw.integers(1, 6, COUNT).astype(np.float32), ids=True)


def factors() -> nn.Module:
    return MatrixFactorizationModule(MatrixFactorizationConfig(factors=4, spread=1.0), USERS, ITEMS)


CASES: dict[str, tuple[str, DataSpec, Callable[[], nn.Module], Callable[[int], Samples]]] = {
    "one number": ("regression", DataSpec((3,), task="regression"), lambda: nn.Linear(3, 1),
                   lambda seed: numbers(1, seed)),
    "two numbers": ("regression", DataSpec((3,), task="regression", target_shape=(2,)), lambda: nn.Linear(3, 2),
                    lambda seed: numbers(2, seed)),
    "ratings": ("rating", DataSpec((2,), "ids", "rating", users=USERS, items=ITEMS), factors, ratings),
}  # fmt: skip
TASK_CASES = pytest.mark.parametrize("case", CASES)


def make(case: str, uid: int = 0, **keys: object) -> Supervised:
    name, spec, module, share = CASES[case]
    torch.manual_seed(5)
    found = load_class(name, TASKS, "task")
    task = found(found.Config.model_validate({"name": name}), spec)
    config = SupervisedConfig.model_validate({"name": "supervised", **keys})
    return Supervised(config, FlatModel(module()), task, NodeSamples(share(uid), share(100)), seed=1, uid=uid)


@TASK_CASES
def test_contract(case: str) -> None:
    check_training(lambda uid: make(case, uid, batch_size=8, local_steps=2, privacy={"noise": 0.5}))


@TASK_CASES
def test_without_noise_and_bound_training_is_the_ordinary_one(case: str) -> None:
    """With all samples in every step, whose order alone differs."""
    keys = {"batch_size": COUNT, "local_steps": 2, "optimizer": {"name": "sgd", "lr": 0.05}}
    private, ordinary = make(case, privacy=NO_NOISE, **keys), make(case, **keys)
    for round in range(3):
        found, wanted = (each.local_update(round) for each in (private, ordinary))
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5) and found.units == wanted.units
    assert torch.allclose(private.model.parameters, ordinary.model.parameters, atol=1e-6)


@TASK_CASES
def test_every_gradient_is_clipped_as_in_a_loop_over_the_samples(case: str) -> None:
    training, clip = make(case, batch_size=COUNT, privacy={"noise": 0, "clip": 2.0}), 2.0
    model, (batch,) = training.model, training.share.batches(1)
    inputs, targets = batch
    training._step_gradient(inputs, targets, torch.zeros(()))
    found, expected, norms = model.gradients(), torch.zeros_like(model.parameters), []
    for one, wanted in zip(inputs, targets, strict=True):
        training._gradients.clear()
        functional.mse_loss(model.module(one[None]).flatten(), wanted.flatten()).backward()
        gradient = model.gradients()
        norms.append(float(gradient.norm()))
        expected += gradient * min(1.0, clip / norms[-1]) / COUNT
    assert min(norms) < clip < max(norms)
    assert torch.allclose(found, expected, atol=1e-6)


# -- whole runs -----------------------------------------------------------------------------------------------


def overrides(case: str, folder: Path) -> list[str]:
    """Returns what changes configs/own/waves.yaml, a regression, to two rounds of a private run of the task."""
    sets = ["communication=inproc", "training={batch_size: 8, local_steps: 3, privacy: {noise: 1.5, delta: 1e-3}}",
            "node={rounds: 2}"]  # fmt: skip
    if case == "regression":
        return sets
    write_movielens(folder, users=4, films=20)
    data = f"{{name: movielens, folder: {folder}, partition: {{name: by_key, even: keys}}, test: own}}"
    return [*sets, f"data={data}", "model={name: matrix_factorization}"]


@needs_opacus
@pytest.mark.parametrize("case", ["regression", "rating"])
def test_runs_measure_their_task_and_epsilon(case: str, tmp_path: Path) -> None:
    nodes = run_in_process(load(WAVES, overrides(case, tmp_path)))
    metric = {"regression": "mse_mean", "rating": "rmse_mean"}[case]
    for node in nodes:
        assert np.isfinite(node.evaluation[metric]) and node.training.task.config.name == case  # type: ignore[attr-defined]
        rate = min(1.0, 8 / node.training.num_samples)
        assert node.figures()["epsilon"] == epsilon_of({(1.5, rate): 6}, 1e-3)


@pytest.mark.parametrize("case", ["regression", "rating"])
def test_clipped_runs_repeat(case: str, tmp_path: Path) -> None:
    """Without noise, for which opacus is not needed."""
    found = []
    for _ in range(2):
        sets = [each.replace("noise: 1.5", "noise: 0") for each in overrides(case, tmp_path)]
        nodes = run_in_process(load(WAVES, sets))
        found.append(torch.stack([node.training.model.parameters for node in nodes]))
    assert torch.equal(*found) and bool(found[0].isfinite().all())
