"""Functions of processes for the tests of elastic jobs, whose ranks die and join (tests/parallel/job_processes.py).

Each takes a pipe to the test first. join: the address of a running job, None for a founder. Processes that the job is
joined by send ("address", job_address()) before they train.
"""

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

from decentnode.metrics.reader import read
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel, initialize_dist, job_address
from decentnode.parallel.membership import generation_groups
from decentnode.parallel.membership.control import ConnectionBroken
from decentnode.parallel.participants import wrapper as participant
from decentnode.parallel.steps.script_optimizer import ScriptOptimizer
from decentnode.parallel.train import TrainingRun
from decentnode.parallel.transports.base import BucketExchange
from tests.conftest import wait_until
from tests.parallel.work import models

SETTINGS = {"timeout_seconds": 300.0, "bucket_size_in_mb": 0.0001}


def wrap_model(lr: float, seed: int = 0, **more: Any) -> DecentralizedDataParallel:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(models.DEVICE)
    optimizer = functools.partial(torch.optim.Adam if lr else torch.optim.SGD, lr=lr)
    return DecentralizedDataParallel(module, optimizer=optimizer, **SETTINGS | more)


def train_step(model: DecentralizedDataParallel, draw: torch.Generator) -> float:
    """Takes a step toward the sum of the inputs, by the script's optimizer if there is one. Returns the loss."""
    x = torch.randn(32, 6, generator=draw).to(models.DEVICE)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    (loss if model._gossip.local.scaler is None else model._gossip.local.scaler.scale(loss)).backward()
    if isinstance(model.optimizer, ScriptOptimizer):
        model.optimizer.step()
        model.optimizer.zero_grad()
    return loss.item()


def mean_bias(model: DecentralizedDataParallel) -> float:
    """Returns the mean of one bias, by which tests tell models apart whose learning rate is 0."""
    return float(model.module[2].bias.detach().double().mean())


def mix_while_ranks_die(
    pipe: Connection, transport: str, victims: dict[int, int], steps: int, topology: Any, sharing: Any = "full",
    delayed: bool = False, step_in_backward: bool = True,
) -> dict[str, Any]:
    """Trains with a learning rate of 0, where each rank begins with its number added to every parameter.

    victims: rank -> the step before which it is killed. Returns bias: this rank's, relative to that of rank 0 at the
    start; mean: that of the mean model; world, rank, steps."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1 if len(victims) > 1 else None, timeout_seconds=300)
    model = wrap_model(0.0, transport=transport, topology=topology, sharing=sharing, delayed=delayed,
                    step_in_backward=step_in_backward)  # fmt: skip
    base = mean_bias(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    draw = torch.Generator().manual_seed(rank)
    while model.steps < steps:
        if model.steps == victims.get(rank):
            time.sleep(0.2)  # what it has sent arrives before it dies
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(model, draw)
    bias = mean_bias(model) - base
    model.global_avg()
    return {"bias": bias, "mean": mean_bias(model) - base, "world": model.world_size, "rank": model.rank,
            "steps": model.steps}  # fmt: skip


def keep_outer_momentum(pipe: Connection) -> dict[str, Any]:
    """Rank 0 is killed between two exchanges of diloco. Returns the norm of the others' outer momentum before its death
    and in the first step without it."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = wrap_model(0.01, topology="complete", sharing={"name": "diloco", "every": 4})
    draw, norms = torch.Generator().manual_seed(rank), []
    while model.world_size == 3 and model.steps < 1000:
        if rank == 0 and model.steps == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(model, draw)
        rules: list[Any] = [bucket.rule for bucket in model._gossip.buckets]
        norms.append(float(torch.cat([rule.momentum for rule in rules]).norm()))
    return {"before": norms[9], "after": norms[-1], "world": model.world_size}


def die_while_gloo_connects(pipe: Connection) -> dict[str, Any]:
    """Rank 0 is killed, and then rank 3 while gloo connects the survivors. Returns the seconds of the longest step of
    the others, and how many ranks there are in the end."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = wrap_model(0.01, transport="collective")
    if rank == 3:
        generation_groups.make_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, misc]
    draw = torch.Generator().manual_seed(rank)
    longest = 0.0
    while model.steps < 12:
        if rank == 0 and model.steps == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        train_step(model, draw)
        longest = max(longest, time.monotonic() - began)
    return {"longest": longest, "world": model.world_size}


def train_until_a_rank_joins(
    pipe: Connection, transport: str, join: str | None, listen: str | None, victim: int | None
) -> dict[str, Any]:
    """Trains until the job has three ranks again, and for 30 steps after that. victim: the founder that is killed after
    ten steps.

    Returns first: the step at which this process began; steps; losses; lr; factor: the adaptive factor, which founders
    set to 0.5; distance: of consensus; world."""
    rank, _ = initialize_dist(missing="regroup", join=join, listen=listen, min_ranks=None if join else 1,
                              timeout_seconds=300)  # fmt: skip
    model = wrap_model(0.01, seed=0 if join is None else 9, transport=transport, sync_buffer_in_global_avg=True,
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
        losses.append(train_step(model, draw))
        if until is None and model.generation and model.world_size == 3:
            until = model.steps + 30
    return {"first": first, "steps": model.steps, "losses": losses, "lr": model.get_lr(),
            "factor": model._gossip.factor, "distance": model.consensus_distance(),
            "world": model.world_size}  # fmt: skip


def break_first_launch(pipe: Connection, transport: str) -> dict[str, Any]:
    """The very first launch of rank 1 finds that a connection is broken. Returns world, generation and bias of the mean
    model."""
    rank, _ = initialize_dist(missing="regroup", timeout_seconds=300)
    launch = BucketExchange.launch

    def raise_once(self: BucketExchange, *args: Any) -> None:
        BucketExchange.launch = launch  # type: ignore[method-assign]
        raise ConnectionBroken("the first launch is broken", [0])

    if rank == 1:
        BucketExchange.launch = raise_once  # type: ignore[method-assign]
    model = wrap_model(0.01, transport=transport)
    draw = torch.Generator().manual_seed(rank)
    while model.steps < 6:
        train_step(model, draw)
    model.global_avg()
    return {"world": model.world_size, "generation": model.generation, "bias": mean_bias(model)}


def join_and_keep_mean(pipe: Connection, transport: str, join: str | None) -> dict[str, Any]:
    """Trains with a learning rate of 0. Two founders begin with their number added to every parameter, and one joins.

    Returns first: sums of the parameters at the start; mean: those of the mean model in the end; steps; scale: of the
    GradScaler, which a process that joins begins with another value."""
    rank, _ = initialize_dist(missing="regroup", join=join, timeout_seconds=300)
    scaler = torch.amp.GradScaler(models.DEVICE.type, init_scale=4.0 if join is None else 1024.0)
    model = wrap_model(0.0, seed=0 if join is None else 9, transport=transport, topology="complete", scaler=scaler)
    pipe.send(("address", job_address()))
    if join is None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    draw = torch.Generator().manual_seed(rank)
    first = [p.detach().clone() for p in model.parameters()]
    until = None if join is None else model.steps + 3
    while model.steps != until:
        train_step(model, draw)
        if until is None and model.world_size == 3:
            until = model.steps + 3
    model.global_avg(will_revert=False)
    return {"first": [float(p.double().sum()) for p in first], "steps": model.steps, "scale": scaler.get_scale(),
            "mean": [float(p.detach().double().sum()) for p in model.parameters()]}  # fmt: skip


def record_training(pipe: Connection, runs: str, join: str | None, resume: bool, epochs: int | None) -> dict[str, Any]:
    """Records a training of epochs of five steps, in which rank 1 is killed in the third epoch.

    epochs: how many there are; None: the training goes on until a fourth process has joined and three further epochs
    are over, and ends without a summary. Returns path: the run's directory; uid; trained: the epochs; first: the step
    at which this process began; steps; world."""
    rank, _ = initialize_dist(missing="regroup", join=join, min_ranks=None if join else 1, timeout_seconds=300)
    model = wrap_model(0.01, seed=0 if join is None else 9)
    pipe.send(("address", job_address()))
    draw = torch.Generator().manual_seed(rank)
    run = TrainingRun(model, "script", config={"seed": 1}, evaluate=lambda module: {"loss": evaluation_loss(module)},
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
                run.add(train_step(model, draw), 32)
                if epochs is None and until is None and model.generation > 1 and model.world_size == 3:
                    until = model.steps // 5 + 3
    return {"path": str(run.path), "uid": run.uid, "trained": trained, "first": first, "steps": model.steps,
            "world": model.world_size}  # fmt: skip


def record_join(pipe: Connection, runs: str, join: str | None, taken: int) -> dict[str, Any]:
    """Records a training of four epochs of five steps. A process joins founders when these have taken so many steps: in
    the next step, or in the evaluation before it. Returns first: the step at which this process began; evaluations:
    (epoch, contributors) of each."""
    rank, _ = initialize_dist(missing="regroup", join=join, min_ranks=None if join else 1, timeout_seconds=300)
    model = wrap_model(0.01)
    pipe.send(("address", job_address()))
    assert model._participant is not None
    first, control, founders = model.steps, model._participant.job.control, model.world_size

    def wait_for_join() -> None:
        if join is None and model.steps == taken:
            wait_until(lambda: control.broken or model.world_size > founders, seconds=200)

    def evaluate(module: nn.Module) -> dict[str, float]:
        wait_for_join()
        return {"loss": evaluation_loss(module)}

    draw = torch.Generator().manual_seed(rank)
    with TrainingRun(model, "script", evaluate=evaluate, metrics=["loss"], runs=runs, steps_per_epoch=5) as run:
        for _ in run.epochs(4):
            for _ in run.steps([()] * 2):
                wait_for_join()
                run.add(train_step(model, draw), 32)
    records = read(run.path / f"nodes/{run.uid:03d}/metrics.jsonl")
    found = [(record["round"], record["contributors"]) for record in records if record["kind"] == "evaluation"]
    return {"first": first, "evaluations": found}


def record_return(pipe: Connection, runs: str) -> list[tuple[int, int]]:
    """Records a training of four epochs of five steps. Rank 2 sends its process's id and suspends itself in the first
    epoch. The others send ("alone", None) before the last step of the third one, and wait until it is back. Returns
    (epoch, contributors) of each evaluation."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = wrap_model(0.01, topology="complete")
    draw = torch.Generator().manual_seed(rank)
    assert model._participant is not None
    control = model._participant.job.control
    with TrainingRun(model, "script", evaluate=lambda module: {"loss": evaluation_loss(module)}, metrics=["loss"],
                     runs=runs, steps_per_epoch=5) as run:  # fmt: skip
        for _ in run.epochs(4):
            for _ in run.steps([()] * 2):
                if rank == 2 and model.steps == 2:
                    pipe.send(("id", os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                if rank != 2 and model.steps == 14:
                    pipe.send(("alone", None))
                    wait_until(lambda: control.broken or model.world_size == 3, seconds=200)
                run.add(train_step(model, draw), 32)
    records = read(run.path / f"nodes/{run.uid:03d}/metrics.jsonl")
    return [(record["round"], record["contributors"]) for record in records if record["kind"] == "evaluation"]


def evaluation_loss(module: nn.Module) -> float:
    assert not module.training and not torch.is_grad_enabled()
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(7)).to(models.DEVICE)
    return float((module(x) - x.sum(1, keepdim=True)).square().mean())


def average_while_ranks_die(pipe: Connection, transport: str, join: str | None) -> dict[str, Any]:
    """Founders call global_avg at different times, and rank 2 is killed while rank 0 waits in it and rank 1 has not
    begun it. Then a fourth process joins, and rank 1 is killed while the others wait in another average.

    Founders send ("first", (own bias, bias of the mean model)) of the first average. Returns own and mean of the
    second."""
    rank, _ = initialize_dist(missing="regroup", join=join, min_ranks=None if join else 1, timeout_seconds=300)
    model = wrap_model(0.0, transport=transport, topology={"name": "line"})
    pipe.send(("address", job_address()))
    draw = torch.Generator().manual_seed(rank)
    if join is None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
        while model.steps < 6:
            train_step(model, draw)
        time.sleep((0.0, 0.9, 0.3)[rank])
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        own = mean_bias(model)
        model.global_avg(will_revert=False)
        pipe.send(("first", (own, mean_bias(model))))
    until = None if join is None else model.steps + 4
    while model.steps != until:
        train_step(model, draw)
        if until is None and model.world_size == 3:
            until = model.steps + 4
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    own = mean_bias(model)
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    model.global_avg()
    return {"mean": mean_bias(model), "own": own, "world": model.world_size}


def train_comm_optimizer(
    pipe: Connection, name: str, overlap: bool, scaled: bool, victims: dict[int, int], join: str | None
) -> dict[str, Any]:
    """Trains with a CommOptimizer until the job has three ranks again, and for 40 steps after that. victims: rank ->
    the step before which it is killed. scaled: through a GradScaler."""
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


def abort_operations_in_flight(rank: int, n: int) -> bool:
    """Rank 1 aborts groups over which rank 0 has sent tensors that it does not receive. Returns whether rank 0's sends
    exist; that the processes survive is the test."""
    groups = [dist.new_group([0, 1]) for _ in range(20)]
    sends = [dist.isend(torch.zeros(1000), 1, group=group) for group in groups] if rank == 0 else []
    dist.barrier()
    if rank == 1:
        generation_groups._abort_operations(list(groups))
        time.sleep(0.5)  # gloo's threads handle the abort meanwhile
    dist.barrier()
    return rank == 1 or len(sends) == 20


def leave_groups_with_operations_in_flight(rank: int, n: int, path: str) -> bool:
    """Rank 0 leaves groups in which it waits for rank 1, with tensors that nothing else references, and rank 1 keeps
    its own until rank 0 has dropped them. Returns whether the groups are gone."""
    groups = generation_groups.GlooGroups(None, "127.0.0.1", 0, 60.0)  # type: ignore[arg-type]
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.zeros(1000), async_op=True)
        dist.all_reduce(torch.zeros(1000), group=pair, async_op=True)
    groups._leave()
    del pair
    generation_groups.make_group(dist.FileStore(path, n), rank, n, 60.0)
    if rank == 1:
        dist.barrier()
    groups.drop_old()
    groups.join_threads()
    if rank == 0:
        dist.barrier()
    return not any(each.is_alive() for each in groups._dropping)


def make_group_after_failed_attempts(rank: int, n: int, path: str) -> float:
    """Makes a group after rank 1, as torch counts, has made three that rank 0 has not. Returns the sum of rank + 1."""
    dist.destroy_process_group()
    if rank == 1:
        dist.distributed_c10d._world.group_count = 3
    generation_groups.make_group(dist.FileStore(path, n), rank, n, 60.0)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return float(total)


def run_single_rank_job(pipe: Connection) -> int:
    """Trains in a job of one rank until the test sends something. Returns the number of the generation."""
    initialize_dist(missing="regroup", timeout_seconds=300)
    model = DecentralizedDataParallel(nn.Linear(3, 1), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    pipe.send(("address", job_address()))
    while not pipe.poll(0.01):
        model(torch.ones(2, 3)).sum().backward()
    return model.generation


def join_with_other_model(pipe: Connection, join: str) -> None:
    """Joins the job of `run_single_rank_job` with a model of another shape."""
    initialize_dist(join=join, timeout_seconds=300)
    DecentralizedDataParallel(nn.Linear(3, 2), optimizer=functools.partial(torch.optim.SGD, lr=0.1))


def wrap_half_frozen_model(lr: float, **more: Any) -> DecentralizedDataParallel:
    """Wraps a model whose first layer is frozen."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(models.DEVICE)
    module[0].requires_grad_(False)
    return DecentralizedDataParallel(module, optimizer=functools.partial(torch.optim.Adam, lr=lr), **SETTINGS | more)


def unfreeze_while_a_rank_dies(pipe: Connection, options: dict[str, Any], dies: str) -> dict[str, Any]:
    """Trains a frozen layer from step 5 on, with a learning rate of 0 and a bias that begins with the rank's number.

    dies: when rank 2 is killed: "before" it unfreezes the layer, "after" that, where it makes the new exchange, or
    "nobody". Returns bias, and that of the mean model, relative to the start; world; optimized: number of
    parameters."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = wrap_half_frozen_model(0.0, **options)
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
        train_step(model, draw)
    bias = float(model.module[0].bias.detach().mean()) - base
    with model.averaged():
        mean = float(model.module[0].bias.detach().mean()) - base
    return {"bias": bias, "mean": mean, "world": model.world_size,
            "optimized": len(model.optimizer.param_groups[0]["params"])}  # fmt: skip


def join_after_unfreezing(pipe: Connection, join: str | None) -> dict[str, Any]:
    """Trains a layer from step 5 on that was frozen, until another process has joined and for 20 steps more.

    Returns names: of the exchanged parameters; moved: how far the unfrozen bias has come; distance: of consensus;
    buckets: how many there are."""
    rank, _ = initialize_dist(missing="regroup", join=join, min_ranks=1, timeout_seconds=300)
    model = wrap_half_frozen_model(0.01)
    first = model.module[0].bias.detach().clone()
    draw = torch.Generator().manual_seed(rank)
    pipe.send(("address", job_address()))
    until = None if join is None else model.steps + 20
    while model.steps != until:
        model.module[0].requires_grad_(model.steps >= 5)
        train_step(model, draw)
        if until is None and model.world_size == 2:
            until = model.steps + 20
        if join is None and model.world_size == 1 and model.steps > 10:
            pipe.poll(0.01)  # waits, so that the process that joins gets CPU time
    moved = float((model.module[0].bias.detach() - first).abs().max())
    return {"names": [name for name, _ in model._named], "moved": moved,
            "distance": model.consensus_distance(), "buckets": len(model._gossip.buckets)}  # fmt: skip


def load_state_with_unfrozen_layer(pipe: Connection) -> tuple[int, int, bool]:
    """Loads the state of a wrapper that had trained all layers into one whose first layer is still frozen, and takes a
    step. Returns (steps, number of exchanged parameters, whether the saved parameters were loaded)."""
    rank, _ = initialize_dist(missing="regroup", min_ranks=1, timeout_seconds=300)
    model = wrap_half_frozen_model(0.01)
    state = copy.deepcopy(model.state_dict())
    trained = nn.Sequential(*(copy.deepcopy(layer) for layer in model.module))
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
    train_step(model, torch.Generator().manual_seed(rank))
    return model.steps, len(model._named), same
