"""Trainings that are recorded as a run."""

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


SPARSE = "PRETENDED_CUDA" not in os.environ  # that GPU has no sparse tensors


class Odd:
    """Whose state no file can keep."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": object()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


class Remembering(Tensors, Full):
    """A rule of a script's own that keeps what it has mixed last."""

    requirements = replace(Full.requirements, linear=False)
    TENSORS = ("last",)
    last: torch.Tensor | None = None

    def mix(self, model: torch.Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, received, view)
        if self.last is not None:
            model.lerp_(self.last, 0.1)
        self.last = model.clone()


class Stopped(Exception):
    """What ends a training between two epochs."""


def wrapped(there: bool | str = False) -> DecentralizedDataParallel:
    """there: by the names of Decent-DP, "faithful" to it; or with a rule that "remembers"."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2)).to(models.DEVICE)
    if there == "remembers":
        return DecentralizedDataParallel(inner, optimizer=SGD, topology="ring", sharing=Remembering,
                                         bucket_size_in_mb=0)  # fmt: skip
    if there:
        adam = partial(decent_dp.optim_fn_accum_adam, lr=0.05)
        return decent_dp.DecentralizedDataParallel(inner, adam, topology="ring", faithful=there == "faithful")
    return DecentralizedDataParallel(inner, optimizer=SGD, topology="complete")


def measure(module: nn.Module) -> dict[str, float]:
    assert not module.training and not torch.is_grad_enabled()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(7)).to(models.DEVICE)
    output, y = module(x), (x.sum(1) > 0).long()
    loss = nn.functional.cross_entropy(output, y)
    return {"accuracy": float((output.argmax(1) == y).float().mean()), "loss": float(loss)}


def inputs(epoch: int, step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * epoch + 10 * step + rank)
    return torch.randn(16, 4, generator=draw).to(models.DEVICE)


def train(
    rank: int, n: int, runs: str, epochs: int, seed: int = 1, stop: int | None = None, resume: bool = False,
    config: Mapping[str, Any] | None = None, there: bool | str = False, **more: Any,
) -> tuple[str, list[int], list[float]]:
    """(the run's directory, the epochs trained, the parameters). stop: the epoch in whose midst it fails."""
    model, trained = wrapped(there), []
    torch.manual_seed(100 + rank)
    run = TrainingRun(model, "script", config=config or {"seed": seed, "betas": (0.9, 0.99)}, evaluate=measure,
                      runs=runs, resume=resume, **more)  # fmt: skip
    try:
        with run:
            for epoch in run.epochs(epochs):
                trained.append(epoch)
                for step in range(4):
                    x = inputs(epoch, step, rank)
                    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
                    loss.backward()
                    run.add(loss, len(x))
                    if epoch == stop and step == 1:
                        raise Stopped
    except Stopped:
        pass
    model.close()
    return str(run.path), trained, flat(model.module).tolist()


def stopped_and_resumed(
    rank: int, n: int, runs: str, there: bool | str = False
) -> tuple[list[tuple[str, list[int], list[float]]], str]:
    """A training at one go, one that fails in its third epoch, and that one again; then with another config."""
    results = [train(rank, n, f"{runs}/whole", 4, there=there)]
    results += [train(rank, n, f"{runs}/parts", 4, stop=2, there=there),
                train(rank, n, f"{runs}/parts", 4, resume=True, there=there)]  # fmt: skip
    try:
        train(rank, n, f"{runs}/parts", 4, seed=2, resume=True)
    except Exception as error:
        return results, str(error)
    return results, ""


def with_other_ranks(
    rank: int, n: int, runs: str, epochs: int, resume: bool
) -> tuple[list[int], list[float], list[float]]:
    """(the epochs trained, the parameters at which they began, and with which they ended)."""
    model, trained = wrapped(), []
    torch.manual_seed(100 + rank)
    with TrainingRun(model, "script", evaluate=measure, runs=runs, resume=resume) as run:
        began = flat(model.module).tolist()
        for epoch in run.epochs(epochs):
            trained.append(epoch)
            for step in range(4):
                x = inputs(epoch, step, rank)
                nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        assert model.steps == 4 * epochs
    return trained, began, flat(model.module).tolist()


def begun_anew(rank: int, n: int, runs: str) -> tuple[list[int], str]:
    """The epochs of a training that had failed in its first; why one without checkpoints does not go on."""
    train(rank, n, runs, 2, stop=0)
    trained = train(rank, n, runs, 2, resume=True)[1]
    train(rank, n, f"{runs}/bare", 2, stop=1, keep=0)
    try:
        train(rank, n, f"{runs}/bare", 2, resume=True, keep=0)
    except Exception as error:
        return trained, str(error)
    return trained, ""


def uneven_disks(rank: int, n: int, runs: str) -> tuple[list[str], list[int]]:
    """A rank cannot write its second checkpoint: the others keep the one before it, from which the run goes on."""
    def refuse(*_: Any) -> int:
        raise OSError("disk full")

    told = []
    write = store.write
    try:
        model = wrapped()
        with TrainingRun(model, "script", evaluate=measure, runs=runs, keep=1) as run:
            for epoch in run.epochs(3):
                model(torch.ones(2, 4, device=models.DEVICE)).sum().backward()
                if epoch == 1 and rank == 1:
                    store.write = refuse
    except (OSError, AssemblyError) as error:
        told.append(f"{type(error).__name__}: {error}")
    store.write = write
    model.close()
    model = wrapped()
    trained = []
    with TrainingRun(model, "script", evaluate=measure, runs=runs, keep=1, resume=True) as run:
        for epoch in run.epochs(3):
            trained.append(epoch)
            model(torch.ones(2, 4, device=models.DEVICE)).sum().backward()
    model.close()
    return told, trained


def drawing(rank: int, n: int, runs: str) -> list[list[float]]:
    """What a script draws before its epochs and in the second of them: at one go, and when it goes on."""
    drawn: list[list[float]] = [[], []]
    for number, epochs in ((0, 2), (1, 1), (1, 2)):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        model = wrapped()
        with TrainingRun(model, "script", runs=f"{runs}/{number}", resume=True) as run:
            drawn[number] = torch.rand(2).tolist()  # such as the script's data
            for epoch in run.epochs(epochs):
                model(torch.ones(2, 4, device=models.DEVICE)).sum().backward()
                found = [random.random(), float(np.random.rand()), float(torch.rand(1))]
                drawn[number] += found if epoch == 1 else []
        model.close()
    return drawn


class Looked(nn.Module):
    """With gradients that are sparse, dense, and of no step's first passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(6, 4, sparse=SPARSE), nn.Linear(4, 2)

    def forward(self, number: int) -> torch.Tensor:
        x = self.table(torch.tensor([number % 6, (number + 1) % 6, 2], device=models.DEVICE))
        return self.linear(x if number % 2 else x.detach()).square().mean()


def added_up(rank: int, n: int, runs: str) -> list[tuple[list[float], int]]:
    """The parameters and steps of a training whose steps of three passes do not end with its epochs of four: at one go,
    and when it goes on after each epoch."""
    found = []
    for name, parts in (("whole", [4]), ("parts", [1, 2, 3, 4])):
        for epochs in parts:
            torch.manual_seed(0)
            model = DecentralizedDataParallel(Looked().to(models.DEVICE), optimizer=partial(torch.optim.SGD, lr=0.05))
            with TrainingRun(model, "script", runs=f"{runs}/{name}", resume=True) as run:
                for epoch in run.epochs(epochs):
                    for number in range(4 * epoch, 4 * epoch + 4):
                        model.set_accumulate_grad(number % 3 != 2)
                        (model(number) * (1 + rank)).backward()
            model.close()
        found.append((flat(model.module).tolist(), model.steps))
    return found


def while_another_does(rank: int, n: int, runs: str, seconds: float) -> list[int] | str:
    """The epochs that are trained, or why none is, where another process may record the same run for so long."""
    records.LOCK_SECONDS = seconds
    try:
        return train(rank, n, runs, 2, resume=True)[1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refusals(rank: int, n: int, runs: str) -> list[str]:
    """What a script is told that names an unknown metric, measures another one, or adds a loss between epochs."""
    told = []
    for more in ({"metrics": ["bleu"]}, {"metrics": ["loss"]}, {"keep": -1}, {"config": {"model": nn.Linear}},
                 {"also": {"odd": Odd()}}):  # fmt: skip
        try:
            train(rank, n, runs, 1, **more)
        except (ValueError, CheckpointError) as error:
            told.append(str(error))
    try:
        TrainingRun(wrapped(), "script", runs=runs).add(1.0)
    except ValueError as error:
        told.append(str(error))
    return told
