"""What ranks do in the tests of members that come and go."""

from __future__ import annotations

import functools
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from decentnode.parallel import CommOptimizer, DecentralizedDataParallel, initialize_dist, job_address

SETTINGS = {"timeout_seconds": 300.0, "bucket_size_in_mb": 0.0001}


def wrapped(lr: float, seed: int = 0, **more: Any) -> DecentralizedDataParallel:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = functools.partial(torch.optim.Adam if lr else torch.optim.SGD, lr=lr)
    return DecentralizedDataParallel(module, optimizer=optimizer, **SETTINGS | more)


def step(model: DecentralizedDataParallel, draw: torch.Generator) -> float:
    x = torch.randn(32, 6, generator=draw)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    (loss if model._scaler is None else model._scaler.scale(loss)).backward()
    return loss.item()


def level(model: DecentralizedDataParallel) -> float:
    """The mean of one bias: what the models are told apart by where nothing is learned."""
    return float(model.module[2].bias.detach().double().mean())


def still(pipe: Connection, transport: str, victims: dict[int, int], steps: int, topology: Any) -> dict[str, Any]:
    """Nothing is learned; ranks begin with their number in every parameter. victims: rank -> the step in whose forward
    pass it is killed."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1 if len(victims) > 1 else None, timeout_seconds=300)
    model = wrapped(0.0, transport=transport, topology=topology)
    base = level(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    draw = torch.Generator().manual_seed(rank)
    while model.steps < steps:
        if model.steps == victims.get(rank):
            time.sleep(0.2)  # what it has sent arrives
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, draw)
    before = level(model) - base
    model.global_avg()
    return {"level": before, "mean": level(model) - base, "world": model.world_size, "rank": model.rank,
            "steps": model.steps}  # fmt: skip


def learn(pipe: Connection, transport: str, join: str | None, listen: str | None, victim: int | None) -> (
    dict[str, Any]
):
    """Train until there are three ranks again, and for 30 steps after that. The address is said first. victim: a rank
    that is killed after ten steps."""
    rank, _ = initialize_dist(missing="regroup", join=join, listen=listen, min_ranks=None if join else 1,
                              timeout_seconds=300)  # fmt: skip
    model = wrapped(0.01, seed=0 if join is None else 9, transport=transport, sync_buffer_in_global_avg=True,
                    lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9))  # fmt: skip
    pipe.send(("address", job_address()))
    if model.generation == 0:
        model.set_adaptive_factor(0.5)
    draw = torch.Generator().manual_seed(rank)
    losses, first = [], model.steps
    until = None if join is None else model.steps + 30
    while model.steps != until:
        if rank == victim and model.generation == 0 and model.steps == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(step(model, draw))
        if until is None and model.generation and model.world_size == 3:
            until = model.steps + 30
    return {"first": first, "steps": model.steps, "losses": losses, "lr": model.get_lr(), "factor": model._factor,
            "distance": model.consensus_distance(), "world": model.world_size}  # fmt: skip


def joined(pipe: Connection, transport: str, join: str | None) -> dict[str, Any]:
    """Nothing is learned; two ranks that begin with their number, and one that comes: the mean must stay."""
    rank, _ = initialize_dist(missing="regroup", join=join, timeout_seconds=300)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 if join is None else 1024.0)
    model = wrapped(0.0, seed=0 if join is None else 9, transport=transport, topology="complete", scaler=scaler)
    pipe.send(("address", job_address()))
    if join is None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    draw = torch.Generator().manual_seed(rank)
    first = [p.detach().clone() for p in model.parameters()]
    until = None if join is None else model.steps + 3
    while model.steps != until:
        step(model, draw)
        if until is None and model.world_size == 3:
            until = model.steps + 3
    model.global_avg(will_revert=False)
    return {"first": [float(p.double().sum()) for p in first], "steps": model.steps, "scale": scaler.get_scale(),
            "mean": [float(p.detach().double().sum()) for p in model.parameters()]}  # fmt: skip


def meet(pipe: Connection, name: str, overlap: bool, scaled: bool, victims: dict[int, int], join: str | None) -> (
    dict[str, Any]
):
    """CommOptimizer until there are three ranks again, and for 40 steps after that; victims: rank -> the step before
    which it is killed."""
    rank, n = initialize_dist(missing="regroup", join=join, min_ranks=None if join else 1, timeout_seconds=300)
    torch.manual_seed(0 if join is None else 9)
    model = nn.Linear(6, 1)
    optimizer = CommOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), name, world_size=n, comm_period=2,
                              dist_pulling_strength=0.2, overlap=overlap)  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    pipe.send(("address", job_address()))
    draw = torch.Generator().manual_seed(rank)
    losses, first = [], optimizer.steps
    until = None if join is None else optimizer.steps + 40
    while optimizer.steps != until:
        if optimizer.steps == victims.get(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, 6, generator=draw)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if scaled:
            scaler.step(optimizer, loss=loss.item())
            scaler.update()
        else:
            optimizer.step(loss=loss.item())
        losses.append(loss.item())
        if until is None and optimizer.generation and optimizer.dist_optimizer.world_size == 3:
            until = optimizer.steps + 40
    return {"first": first, "steps": optimizer.steps, "losses": losses, "world": optimizer.dist_optimizer.world_size,
            "center": optimizer.center.tolist(), "model": optimizer.dist_optimizer.flat_params().tolist()}  # fmt: skip


def alone(pipe: Connection) -> int:
    """A job of one, until somebody speaks: how many generations there were."""
    initialize_dist(missing="regroup", timeout_seconds=300)
    model = DecentralizedDataParallel(nn.Linear(3, 1), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    pipe.send(("address", job_address()))
    while not pipe.poll(0.01):
        model(torch.ones(2, 3)).sum().backward()
    return model.generation


def other(pipe: Connection, join: str) -> None:
    initialize_dist(join=join, timeout_seconds=300)
    DecentralizedDataParallel(nn.Linear(3, 2), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
