"""Functions of ranks for the tests of a CommOptimizer whose ranks have unequal numbers of batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from decentnode.parallel import CommOptimizer
from tests.parallel.work.models import SGD, batch, flat, model

STEPS = 3
"""Each rank has this many more batches in the first part than the rank before it; rank 0 has none."""


def difference_from_rank_0(values: Tensor) -> float:
    """Returns the greatest difference of a tensor from that of rank 0. All ranks must call it."""
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


def train_with_uneven_inputs(rank: int, n: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains in three parts: two inside Join with unequal numbers of batches, the last with four batches on each rank.

    Returns leader: after the joins; steps; apart: the greatest difference from rank 0, of the model with averaged
    gradients, else of the center; model and center: the final values."""
    module = model()
    comm = CommOptimizer(SGD(module.parameters()), name, world_size=n, comm_period=2, **options)
    results: dict[str, Any] = {}
    with Join([comm]):
        train(module, comm, rank, 0, STEPS * rank)
    with Join([comm]):
        train(module, comm, rank, 20, 22 + STEPS * (n - 1 - rank))
    results["leader"] = getattr(comm.dist_optimizer, "leader", None)
    train(module, comm, rank, 40, 44)
    results["steps"] = comm.steps
    results["apart"] = difference_from_rank_0(flat(module) if name == "DDP" else comm.center)
    results["model"], results["center"] = flat(module).numpy(), comm.center.numpy()
    return results


def batch_numbers(rank: int, n: int) -> list[int | None]:
    """Returns, for each step of `train_with_uneven_inputs`, the number of the batch, None for a step without one."""
    most = STEPS * (n - 1)
    first = [t if t < STEPS * rank else None for t in range(most)]
    last = 22 + STEPS * (n - 1 - rank)
    second = [t if t < last else None for t in range(20, 22 + most)]
    return [*first, *second, *range(40, 44)]


def overflow_while_rank_0_idles(rank: int, n: int) -> tuple[int, bool]:
    """Trains through a GradScaler that finds an overflow on rank 1 while rank 0 has no batch. Returns (steps, whether
    all parameters are finite)."""
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
