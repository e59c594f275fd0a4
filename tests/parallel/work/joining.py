"""What ranks do in the tests of a CommOptimizer whose ranks have unequally many batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from decentnode.parallel import CommOptimizer
from tests.parallel.work.models import SGD, batch, flat, model

STEPS = 3
"""More steps of each rank than the one before has; rank 0 has none at first."""


def spread(values: Tensor) -> float:
    first = values.clone()
    dist.broadcast(first, 0)
    return float((values - first).abs().max())


def train(module: nn.Module, comm: CommOptimizer, rank: int, first: int, last: int) -> None:
    for t in range(first, last):
        x, y = batch(rank, t)
        comm.zero_grad()
        loss = (module(x) - y).square().mean()
        loss.backward()
        comm.step(loss=loss.item())


def uneven(rank: int, n: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Twice with unequally many batches, then with equally many."""
    module = model()
    comm = CommOptimizer(SGD(module.parameters()), name, world_size=n, comm_period=2, **options)
    found: dict[str, Any] = {}
    with Join([comm]):
        train(module, comm, rank, 0, STEPS * rank)
    with Join([comm]):
        train(module, comm, rank, 20, 22 + STEPS * (n - 1 - rank))
    found["leader"] = getattr(comm.dist_optimizer, "leader", None)
    train(module, comm, rank, 40, 44)
    found["steps"] = comm.steps
    found["apart"] = spread(flat(module) if name == "DDP" else comm.center)
    found["model"], found["center"] = flat(module).numpy(), comm.center.numpy()
    return found


def steps_of(rank: int, n: int) -> list[int | None]:
    """[step] the number of the batch that `uneven` trains with, None for a step without one."""
    most = STEPS * (n - 1)
    first = [t if t < STEPS * rank else None for t in range(most)]
    last = 22 + STEPS * (n - 1 - rank)
    second = [t if t < last else None for t in range(20, 22 + most)]
    return [*first, *second, *range(40, 44)]


def scaled(rank: int, n: int) -> tuple[int, bool]:
    """A GradScaler, an overflow on rank 1 while rank 0 has no batch: (steps, whether all numbers are finite)."""
    module = model()
    comm = CommOptimizer(SGD(module.parameters()), "EASGD", world_size=n, comm_period=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with Join([comm]):
        for t in range(4 * rank):
            x, y = batch(rank, t)
            comm.zero_grad()
            scaler.scale((module(x) - y).square().mean() * (float("inf") if t == 1 else 1.0)).backward()
            scaler.step(comm)
            scaler.update()
    return comm.steps, bool(flat(module).isfinite().all())
