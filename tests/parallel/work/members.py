"""What ranks do in the tests of members that come and go."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from decentnode.parallel import CommOptimizer, DecentralizedDataParallel, initialize_dist, job_address
from decentnode.parallel.membership import generation_groups
from decentnode.parallel.membership.control import ConnectionBroken
from decentnode.parallel.participants import wrapper as participant
from decentnode.parallel.steps.script_optimizer import ScriptOptimizer
from decentnode.parallel.train import TrainingRun
from decentnode.parallel.transports.base import BucketExchange
from tests.parallel.work import models

SETTINGS = {"timeout_seconds": 300.0, "bucket_size_in_mb": 0.0001}


def wrapped(lr: float, seed: int = 0, **more: Any) -> DecentralizedDataParallel:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(models.DEVICE)
    optimizer = functools.partial(torch.optim.Adam if lr else torch.optim.SGD, lr=lr)
    return DecentralizedDataParallel(module, optimizer=optimizer, **SETTINGS | more)


def step(model: DecentralizedDataParallel, draw: torch.Generator) -> float:
    x = torch.randn(32, 6, generator=draw).to(models.DEVICE)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    (loss if model._gossip.local.scaler is None else model._gossip.local.scaler.scale(loss)).backward()
    if isinstance(model.optimizer, ScriptOptimizer):
        model.optimizer.step()
        model.optimizer.zero_grad()
    return loss.item()


def level(model: DecentralizedDataParallel) -> float:
    """The mean of one bias: what the models are told apart by where nothing is learned."""
    return float(model.module[2].bias.detach().double().mean())


def still(pipe: Connection, transport: str, victims: dict[int, int], steps: int, topology: Any, sharing: Any = "full",
          delayed: bool = False, step_in_backward: bool = True) -> dict[str, Any]:  # fmt: skip
    """Nothing is learned; ranks begin with their number in every parameter. victims: rank -> the step in whose forward
    pass it is killed."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1 if len(victims) > 1 else None, timeout_seconds=300)
    model = wrapped(0.0, transport=transport, topology=topology, sharing=sharing, delayed=delayed,
                    step_in_backward=step_in_backward)  # fmt: skip
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


def connecting(pipe: Connection) -> dict[str, Any]:
    """Rank 0 dies, and then rank 3 as gloo connects those that are left: the longest step of the others."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = wrapped(0.01, transport="collective")
    if rank == 3:
        generation_groups.make_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, misc]
    draw = torch.Generator().manual_seed(rank)
    longest = 0.0
    while model.steps < 12:
        if rank == 0 and model.steps == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        step(model, draw)
        longest = max(longest, time.monotonic() - began)
    return {"longest": longest, "world": model.world_size}


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
    return {"first": first, "steps": model.steps, "losses": losses, "lr": model.get_lr(),
            "factor": model._gossip.factor, "distance": model.consensus_distance(),
            "world": model.world_size}  # fmt: skip


def first_launch_breaks(pipe: Connection, transport: str) -> dict[str, Any]:
    """The very first launch of rank 1 finds that a connection is broken."""
    rank, _ = initialize_dist(missing="regroup", timeout_seconds=300)
    launch = BucketExchange.launch

    def breaks(self: BucketExchange, *args: Any) -> None:
        BucketExchange.launch = launch  # type: ignore[method-assign]
        raise ConnectionBroken("the first launch is broken", [0])

    if rank == 1:
        BucketExchange.launch = breaks  # type: ignore[method-assign]
    model = wrapped(0.01, transport=transport)
    draw = torch.Generator().manual_seed(rank)
    while model.steps < 6:
        step(model, draw)
    model.global_avg()
    return {"world": model.world_size, "generation": model.generation, "level": level(model)}


def joined(pipe: Connection, transport: str, join: str | None) -> dict[str, Any]:
    """Nothing is learned; two ranks that begin with their number, and one that comes: the mean must stay."""
    rank, _ = initialize_dist(missing="regroup", join=join, timeout_seconds=300)
    scaler = torch.amp.GradScaler(models.DEVICE.type, init_scale=4.0 if join is None else 1024.0)
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


def recorded(pipe: Connection, runs: str, join: str | None, resume: bool, epochs: int | None) -> dict[str, Any]:
    """A recorded training of three ranks, of which rank 1 dies in the third epoch; until a fourth has come and three
    further epochs are over, or for so many epochs. It ends without a summary if its epochs are not given."""
    rank, _ = initialize_dist(missing="regroup", join=join, min_ranks=None if join else 1, timeout_seconds=300)
    model = wrapped(0.01, seed=0 if join is None else 9)
    pipe.send(("address", job_address()))
    draw = torch.Generator().manual_seed(rank)
    run = TrainingRun(model, "script", config={"seed": 1}, evaluate=lambda module: {"loss": measured(module)},
                      metrics=["loss"], runs=runs, resume=resume, steps_per_epoch=5)  # fmt: skip
    trained, until = [], None if join is None else model.steps // 5 + 3
    first = model.steps
    with run if epochs is not None else contextlib.nullcontext():
        for epoch in run.epochs(epochs or 1 << 20):
            if until is not None and epoch >= until:
                break
            trained.append(epoch)
            for _ in run.steps([()] * 2):
                if rank == 1 and not resume and model.steps == 12:
                    os.kill(os.getpid(), signal.SIGKILL)
                run.add(step(model, draw), 32)
                if epochs is None and until is None and model.generation > 1 and model.world_size == 3:
                    until = model.steps // 5 + 3
    return {"path": str(run.path), "uid": run.uid, "trained": trained, "first": first, "steps": model.steps,
            "world": model.world_size}  # fmt: skip


def measured(module: nn.Module) -> float:
    assert not module.training and not torch.is_grad_enabled()
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(7)).to(models.DEVICE)
    return float((module(x) - x.sum(1, keepdim=True)).square().mean())


def averages(pipe: Connection, transport: str, join: str | None) -> dict[str, Any]:
    """Three ranks average; one dies while one waits in it and another has not begun it. A fourth joins, and one more
    dies in the average after that."""
    rank, _ = initialize_dist(missing="regroup", join=join, min_ranks=None if join else 1, timeout_seconds=300)
    model = wrapped(0.0, transport=transport, topology={"name": "line"})
    pipe.send(("address", job_address()))
    draw = torch.Generator().manual_seed(rank)
    if join is None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
        while model.steps < 6:
            step(model, draw)
        time.sleep((0.0, 0.9, 0.3)[rank])
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        own = level(model)
        model.global_avg(will_revert=False)
        pipe.send(("first", (own, level(model))))
    until = None if join is None else model.steps + 4
    while model.steps != until:
        step(model, draw)
        if until is None and model.world_size == 3:
            until = model.steps + 4
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    own = level(model)
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    model.global_avg()
    return {"mean": level(model), "own": own, "world": model.world_size}


def meet(pipe: Connection, name: str, overlap: bool, scaled: bool, victims: dict[int, int], join: str | None) -> (
    dict[str, Any]
):
    """CommOptimizer until there are three ranks again, and for 40 steps after that; victims: rank -> the step before
    which it is killed."""
    rank, n = initialize_dist(missing="regroup", join=join, min_ranks=None if join else 1, timeout_seconds=300)
    torch.manual_seed(0 if join is None else 9)
    model = nn.Linear(6, 1).to(models.DEVICE)
    optimizer = CommOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), name, world_size=n, comm_period=2,
                              dist_pulling_strength=0.2, overlap=overlap)  # fmt: skip
    scaler = torch.amp.GradScaler(models.DEVICE.type, init_scale=4.0, enabled=scaled)
    pipe.send(("address", job_address()))
    draw = torch.Generator().manual_seed(rank)
    losses, first = [], optimizer.steps
    until = None if join is None else optimizer.steps + 40
    while optimizer.steps != until:
        if optimizer.steps == victims.get(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, 6, generator=draw).to(models.DEVICE)
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


def given_up(rank: int, n: int) -> bool:
    """Rank 0 has sent what rank 1 does not ask for."""
    groups = [dist.new_group([0, 1]) for _ in range(20)]
    kept = [dist.isend(torch.zeros(1000), 1, group=each) for each in groups] if rank == 0 else []
    dist.barrier()
    if rank == 1:
        inner = list(groups)
        generation_groups._abort_operations(inner)
        time.sleep(0.5)  # what gloo's threads do about it
    dist.barrier()
    return rank == 1 or len(kept) == 20


def tried_in_vain(rank: int, n: int, path: str) -> float:
    """The sum of what both have, in a group that one had tried to make before, as far as torch counts attempts."""
    dist.destroy_process_group()
    if rank == 1:
        dist.distributed_c10d._world.group_count = 3
    generation_groups.make_group(dist.FileStore(path, n), rank, n, 60.0)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return float(total)


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


def frozen(lr: float, **more: Any) -> DecentralizedDataParallel:
    """Its first layer is frozen."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(models.DEVICE)
    module[0].requires_grad_(False)
    return DecentralizedDataParallel(module, optimizer=functools.partial(torch.optim.Adam, lr=lr), **SETTINGS | more)


def unfreezes(pipe: Connection, options: dict[str, Any], dies: str) -> dict[str, Any]:
    """Ranks train a layer from step 5 on that was frozen, with their own values in it, and learn nothing. Rank 2 is
    killed when it has dealt with that layer ("after", where it then makes its exchange), "before", or not."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = frozen(0.0, **options)
    base = float(model.module[0].bias.detach().mean())
    with torch.no_grad():
        model.module[0].bias.add_(rank)
    if rank == 2 and dies == "after":
        participant.make_exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    draw = torch.Generator().manual_seed(rank)
    while model.steps < 30:
        model.module[0].requires_grad_(model.steps >= 5)
        if rank == 2 and dies == "before" and model.steps == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, draw)
    level = float(model.module[0].bias.detach().mean()) - base
    with model.averaged():
        mean = float(model.module[0].bias.detach().mean()) - base
    return {"level": level, "mean": mean, "world": model.world_size,
            "optimized": len(model.optimizer.param_groups[0]["params"])}  # fmt: skip


def unfrozen_is_joined(pipe: Connection, join: str | None) -> dict[str, Any]:
    """A rank trains a layer that was frozen until another one has come to it, and 20 steps more."""
    rank, _ = initialize_dist(missing="regroup", join=join, min_ranks=1, timeout_seconds=300)
    model = frozen(0.01)
    first = model.module[0].bias.detach().clone()
    draw = torch.Generator().manual_seed(rank)
    pipe.send(("address", job_address()))
    until = None if join is None else model.steps + 20
    while model.steps != until:
        model.module[0].requires_grad_(model.steps >= 5)
        step(model, draw)
        if until is None and model.world_size == 2:
            until = model.steps + 20
        if join is None and model.world_size == 1 and model.steps > 10:
            pipe.poll(0.01)  # the other one is on its way
    moved = float((model.module[0].bias.detach() - first).abs().max())
    return {"names": [name for name, _ in model._named], "moved": moved,
            "distance": model.consensus_distance(), "buckets": len(model._gossip.buckets)}  # fmt: skip


def unfrozen_is_resumed(pipe: Connection) -> tuple[int, int, bool]:
    """(steps, parameters that are exchanged, whether they are the saved ones) of a wrapper whose layer is still frozen,
    which has loaded the state of one that had trained it."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = frozen(0.01)
    state = copy.deepcopy(model.state_dict())
    trained = nn.Sequential(*(copy.deepcopy(each) for each in model.module))
    trained.requires_grad_(True)
    saved = torch.optim.Adam(trained.parameters(), lr=0.01)
    trained(torch.ones(2, 6)).sum().backward()
    saved.step()
    extra = state["_extra_state"]
    extra["optimizer"], extra["steps"] = saved.state_dict(), 7
    extra["layout"] = [[(name, p.numel()) for name, p in trained.named_parameters()]]
    state |= {f"module.{name}": value for name, value in trained.state_dict().items()}
    model.load_state_dict(state)
    same = all(map(torch.equal, model.module.parameters(), trained.parameters()))
    step(model, torch.Generator().manual_seed(rank))
    return model.steps, len(model._named), same
