"""Functions of ranks for the tests of trainings that are recorded as a run (`TrainingRun`)."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from decentnode.checkpoint import store
from decentnode.compat import decent_dp
from decentnode.errors import AssemblyError, CheckpointError
from decentnode.graph.base import RoundView
from decentnode.parallel import DecentralizedDataParallel
from decentnode.parallel.recording import records
from decentnode.parallel.train import TrainingRun
from decentnode.payload import Payload
from decentnode.sharing.full import Full
from decentnode.sharing.state import Tensors
from tests.parallel.work import models
from tests.parallel.work.models import flat

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


SPARSE = "PRETENDED_CUDA" not in os.environ  # the pretended GPU has no sparse tensors


class UnsavableState:
    """Has a state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": object()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


class RuleWithTensorState(Tensors, Full):
    """A rule of a script's own that keeps the last mixed model and mixes a tenth of it into the next."""

    requirements = replace(Full.requirements, linear=False)
    TENSORS = ("last",)
    last: torch.Tensor | None = None

    def mix(self, model: torch.Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, received, view)
        if self.last is not None:
            model.lerp_(self.last, 0.1)
        self.last = model.clone()


class TrainingStopped(Exception):
    """Ends a training in the midst of an epoch."""


def wrap_model(variant: str = "plain") -> DecentralizedDataParallel:
    """variant: "plain"; "decent_dp": by the names of Decent-DP; "faithful": the same with faithful=True; "stateful
    rule": with RuleWithTensorState."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2)).to(models.DEVICE)
    if variant == "stateful rule":
        return DecentralizedDataParallel(inner, optimizer=SGD, topology="ring", sharing=RuleWithTensorState,
                                         bucket_size_in_mb=0)  # fmt: skip
    if variant in ("decent_dp", "faithful"):
        adam = partial(decent_dp.optim_fn_accum_adam, lr=0.05)
        return decent_dp.DecentralizedDataParallel(inner, adam, topology="ring", faithful=variant == "faithful")
    return DecentralizedDataParallel(inner, optimizer=SGD, topology="complete")


def evaluate(module: nn.Module) -> dict[str, float]:
    assert not module.training and not torch.is_grad_enabled()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(7)).to(models.DEVICE)
    output, y = module(x), (x.sum(1) > 0).long()
    loss = nn.functional.cross_entropy(output, y)
    return {"accuracy": float((output.argmax(1) == y).float().mean()), "loss": float(loss)}


def make_inputs(epoch: int, step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * epoch + 10 * step + rank)
    return torch.randn(16, 4, generator=draw).to(models.DEVICE)


def train(
    rank: int, n: int, runs: str, epochs: int, seed: int = 1, stop: int | None = None, resume: bool = False,
    config: Mapping[str, Any] | None = None, variant: str = "plain", **more: Any,
) -> tuple[str, list[int], list[float]]:
    """Records a training of epochs of four steps. Returns (the run's directory, the epochs trained, the parameters in
    the end). stop: the epoch in the midst of which the training fails."""
    model, trained = wrap_model(variant), []
    torch.manual_seed(100 + rank)
    run = TrainingRun(model, "script", config=config or {"seed": seed, "betas": (0.9, 0.99)}, evaluate=evaluate,
                      runs=runs, resume=resume, **more)  # fmt: skip
    try:
        with run:
            for epoch in run.epochs(epochs):
                trained.append(epoch)
                for step in range(4):
                    x = make_inputs(epoch, step, rank)
                    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
                    loss.backward()
                    run.add(loss, len(x))
                    if epoch == stop and step == 1:
                        raise TrainingStopped
    except TrainingStopped:
        pass
    model.close()
    return str(run.path), trained, flat(model.module).tolist()


def stop_and_resume(
    rank: int, n: int, runs: str, variant: str = "plain"
) -> tuple[list[tuple[str, list[int], list[float]]], str]:
    """Trains four epochs without a stop; then the same, failing in the third epoch, and resumes that run. Returns (the
    three results of `train`, the error where the run is resumed with another config)."""
    results = [train(rank, n, f"{runs}/whole", 4, variant=variant)]
    results += [train(rank, n, f"{runs}/parts", 4, stop=2, variant=variant),
                train(rank, n, f"{runs}/parts", 4, resume=True, variant=variant)]  # fmt: skip
    try:
        train(rank, n, f"{runs}/parts", 4, seed=2, resume=True)
    except Exception as error:
        return results, str(error)
    return results, ""


def train_with_other_world_size(
    rank: int, n: int, runs: str, epochs: int, resume: bool
) -> tuple[list[int], list[float], list[float]]:
    """Begins or resumes a run with this number of ranks. Returns (the epochs trained, the parameters before, after)."""
    model, trained = wrap_model(), []
    torch.manual_seed(100 + rank)
    with TrainingRun(model, "script", evaluate=evaluate, runs=runs, resume=resume) as run:
        before = flat(model.module).tolist()
        for epoch in run.epochs(epochs):
            trained.append(epoch)
            for step in range(4):
                x = make_inputs(epoch, step, rank)
                nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        assert model.steps == 4 * epochs
    return trained, before, flat(model.module).tolist()


def restart_after_failed_first_epoch(rank: int, n: int, runs: str) -> tuple[list[int], str]:
    """Returns (the epochs of a resumed run that had failed in its first epoch, the error where a run without
    checkpoints is resumed)."""
    train(rank, n, runs, 2, stop=0)
    trained = train(rank, n, runs, 2, resume=True)[1]
    train(rank, n, f"{runs}/bare", 2, stop=1, keep=0)
    try:
        train(rank, n, f"{runs}/bare", 2, resume=True, keep=0)
    except Exception as error:
        return trained, str(error)
    return trained, ""


def fail_to_write_on_rank_1(rank: int, n: int, runs: str) -> tuple[list[str], list[int]]:
    """Rank 1 cannot write its second checkpoint, and the run is then resumed. Returns (the errors, the epochs of the
    resumed run)."""
    def raise_disk_full(*_: Any) -> int:
        raise OSError("disk full")

    errors = []
    write = store.write
    try:
        model = wrap_model()
        with TrainingRun(model, "script", evaluate=evaluate, runs=runs, keep=1) as run:
            for epoch in run.epochs(3):
                model(torch.ones(2, 4, device=models.DEVICE)).sum().backward()
                if epoch == 1 and rank == 1:
                    store.write = raise_disk_full
    except (OSError, AssemblyError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    store.write = write
    model.close()
    model = wrap_model()
    trained = []
    with TrainingRun(model, "script", evaluate=evaluate, runs=runs, keep=1, resume=True) as run:
        for epoch in run.epochs(3):
            trained.append(epoch)
            model(torch.ones(2, 4, device=models.DEVICE)).sum().backward()
    model.close()
    return errors, trained


def draw_random_numbers(rank: int, n: int, runs: str) -> list[list[float]]:
    """Returns the random numbers that a script draws before its epochs and in the second epoch: in a run without a
    stop, and in one that is resumed after the first epoch."""
    drawn: list[list[float]] = [[], []]
    for number, epochs in ((0, 2), (1, 1), (1, 2)):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        model = wrap_model()
        with TrainingRun(model, "script", runs=f"{runs}/{number}", resume=True) as run:
            drawn[number] = torch.rand(2).tolist()  # as a script does that draws its data
            for epoch in run.epochs(epochs):
                model(torch.ones(2, 4, device=models.DEVICE)).sum().backward()
                numbers = [random.random(), float(np.random.rand()), float(torch.rand(1))]
                drawn[number] += numbers if epoch == 1 else []
        model.close()
    return drawn


class EmbeddingModel(nn.Module):
    """A model whose embedding has a sparse gradient, in odd passes only, and whose linear layer has a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(6, 4, sparse=SPARSE), nn.Linear(4, 2)

    def forward(self, number: int) -> torch.Tensor:
        x = self.table(torch.tensor([number % 6, (number + 1) % 6, 2], device=models.DEVICE))
        return self.linear(x if number % 2 else x.detach()).square().mean()


def accumulate_across_epochs(rank: int, n: int, runs: str) -> list[tuple[list[float], int]]:
    """Trains four epochs of four passes, where three passes make a step, so that epochs end with gradients that no step
    has used yet. Returns (parameters, steps) of a run without a stop, and of one that is resumed after each epoch."""
    results = []
    for name, parts in (("whole", [4]), ("parts", [1, 2, 3, 4])):
        for epochs in parts:
            torch.manual_seed(0)
            model = DecentralizedDataParallel(EmbeddingModel().to(models.DEVICE),
                                              optimizer=partial(torch.optim.SGD, lr=0.05))  # fmt: skip
            with TrainingRun(model, "script", runs=f"{runs}/{name}", resume=True) as run:
                for epoch in run.epochs(epochs):
                    for number in range(4 * epoch, 4 * epoch + 4):
                        model.set_accumulate_grad(number % 3 != 2)
                        (model(number) * (1 + rank)).backward()
            model.close()
        results.append((flat(model.module).tolist(), model.steps))
    return results


def train_while_another_records(rank: int, n: int, runs: str, seconds: float) -> list[int] | str:
    """Resumes a run that another process may be recording. Returns the epochs trained, or the error. seconds: how long
    to wait for the lock."""
    records.LOCK_SECONDS = seconds
    try:
        return train(rank, n, runs, 2, resume=True)[1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def reasons_of_refusals(rank: int, n: int, runs: str) -> list[str]:
    """Returns the errors for an unknown metric, another one than is measured, keep=-1, a config and a state that cannot
    be saved, and a loss that is added outside of an epoch."""
    errors = []
    for more in ({"metrics": ["bleu"]}, {"metrics": ["loss"]}, {"keep": -1}, {"config": {"model": nn.Linear}},
                 {"also": {"odd": UnsavableState()}}):  # fmt: skip
        try:
            train(rank, n, runs, 1, **more)
        except (ValueError, CheckpointError) as error:
            errors.append(str(error))
    try:
        TrainingRun(wrap_model(), "script", runs=runs).add(1.0)
    except ValueError as error:
        errors.append(str(error))
    return errors
