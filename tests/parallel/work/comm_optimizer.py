"""Functions of ranks for the tests of CommOptimizer."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from decentnode.errors import AssemblyError
from decentnode.parallel import CommOptimizer
from decentnode.parallel.process_group import machines as per_machine
from tests.parallel.work import models
from tests.parallel.work.models import batch, flat, model


def count_ranks_per_machine(rank: int, n: int, hosts: list[str]) -> tuple[int, int, int]:
    """Returns the number of ranks per machine (that LSGD counts, that the wrapper counts, that torchrun tells LSGD).
    hosts: [rank] the machine that it pretends to be on."""
    def per_machine_of_lsgd() -> int:
        made = CommOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1), "LSGD", world_size=n)
        return int(made.dist_optimizer.ranks_per_machine)

    from_torchrun = per_machine_of_lsgd()
    del os.environ["LOCAL_WORLD_SIZE"]
    per_machine.boot_id = lambda: hosts[rank]
    return per_machine_of_lsgd(), per_machine.ranks_per_machine(), from_torchrun


def agree_on_ranks_per_machine(
    rank: int, n: int, environment: list[str | None], arguments: dict[int, int]
) -> int | str | None:
    """Returns the number of ranks per machine on which the ranks agree, or the error. Ranks 0 and 1 are on one machine,
    2 and 3 on another. environment: [rank] its LOCAL_WORLD_SIZE, None if unset. arguments: rank -> the number that the
    script gives there."""
    del os.environ["LOCAL_WORLD_SIZE"]
    if (mine := environment[rank]) is not None:
        os.environ["LOCAL_WORLD_SIZE"] = mine
    per_machine.boot_id = lambda: f"host {rank // 2}"
    try:
        return per_machine.agreed_per_machine(arguments.get(rank))
    except (AssemblyError, ValueError) as error:
        return str(error)


def exchange_and_train(rank: int, n: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Takes nine steps of a parameter whose gradient is zero, which exchanges alone change, then trains a model.

    Returns unchanged_at_start: whether making the optimizer left the parameter; center_is_mean: whether the center is
    the mean at the start; exchange_steps: those that changed the parameter; conserved: by how much the sum of all
    parameters and centers has changed; leader; parameter: its last value; losses: of the first and last three steps of
    the training; lr."""
    warnings.simplefilter("error")
    torch.manual_seed(rank)
    parameter = nn.Parameter(torch.randn(7).to(models.DEVICE))
    start = parameter.detach().clone()
    local = torch.optim.SGD([parameter], lr=0.1, momentum=0.9 if name == "EAMSGD" else 0.0)
    comm = CommOptimizer(local, name, world_size=n, comm_period=3, **options)
    total = start.clone()
    if n > 1:
        dist.all_reduce(total)
    results: dict[str, Any] = {"unchanged_at_start": torch.equal(start, parameter),
                             "center_is_mean": torch.allclose(comm.center, total / n)}  # fmt: skip
    exchange_steps = []
    for step in range(9):
        parameter.grad = torch.zeros_like(parameter)
        before = parameter.detach().clone()
        comm.step(loss=float(rank))
        if not torch.equal(before, parameter):
            exchange_steps.append(step + 1)
    after = parameter.detach().clone()
    if n > 1:
        dist.all_reduce(after)
    results["exchange_steps"] = exchange_steps
    results["conserved"] = float((after + comm.center - total - total / n).abs().max())
    results["leader"] = getattr(comm.dist_optimizer, "leader", None)
    results["parameter"] = parameter.detach().tolist()
    module = model()
    local = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    trained = CommOptimizer(local, name, world_size=n, comm_period=4, **options)
    schedule = torch.optim.lr_scheduler.StepLR(trained, 5, 0.5)
    losses = []
    for t in range(30):
        x, y = batch(rank, t % 3)
        trained.zero_grad()
        loss = (module(x) - y).square().mean()
        loss.backward()
        trained.step(loss=loss.item())
        schedule.step()
        losses.append(loss.item())
        if t == 14:
            state = copy.deepcopy(trained.state_dict())
            trained = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True), name,
                                    world_size=n, comm_period=4, **options)  # fmt: skip
            trained.load_state_dict(state)
            schedule.optimizer = trained
    results["losses"] = (sum(losses[:3]), sum(losses[-3:]))
    results["lr"] = trained.param_groups[0]["lr"]
    return results


def compare_compiled_step(rank: int, n: int, name: str) -> tuple[bool, int]:
    """Returns (whether a compiled training step has the bits of a plain one, the steps that it took)."""
    def step(module: nn.Module, comm: CommOptimizer, t: int) -> None:
        x, y = batch(rank, t)
        comm.zero_grad()
        loss = (module(x) - y).square().mean()
        loss.backward()
        comm.step(loss=loss)

    results = []
    for take_step in (step, torch.compile(step, backend="eager")):
        module = model()
        comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.05), name, n, comm_period=2)
        for t in range(5):
            take_step(module, comm, t)
        results.append(flat(module))
    return torch.equal(*results), comm.steps


def exchange_with_overlap(rank: int, n: int, name: str, period: int) -> dict[str, Any]:
    """Trains with exchanges that overlap the next steps, as `exchange_and_train`, and resumes while one is in flight.

    Returns exchange_steps and conserved as there; same_after_resume: whether a training that was saved and loaded after
    any step of a period has the bits of one that was not."""
    torch.manual_seed(rank)
    parameter = nn.Parameter(torch.randn(7))
    local = torch.optim.SGD([parameter], lr=0.1, momentum=0.9 if name == "EAMSGD" else 0.0)
    comm = CommOptimizer(local, name, world_size=n, comm_period=period, dist_pulling_strength=0.2, overlap=True)
    total = torch.cat([parameter.detach(), comm.center])
    exchange_steps = []
    for step in range(9):
        parameter.grad, before = torch.zeros(7), parameter.detach().clone()
        comm.step(loss=float(rank))
        if not torch.equal(before, parameter):
            exchange_steps.append(step + 1)
    after = torch.cat([parameter.detach(), comm.center])
    dist.all_reduce(total)
    dist.all_reduce(after)
    conserved = after[:7] + after[7:] / n - total[:7] - total[7:] / n
    ends = []
    for resumed in (None, *range(8, 8 + period)):
        module = model()
        make = partial(torch.optim.SGD, list(module.parameters()), lr=0.05, momentum=0.9)
        trained = CommOptimizer(make(), name, world_size=n, comm_period=period, overlap=True)
        for t in range(16):
            x, y = batch(rank, t)
            trained.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            trained.step(loss=loss.item())
            if t == resumed:
                state = models.through_file(trained.state_dict())
                trained = CommOptimizer(make(), name, world_size=n, comm_period=period, overlap=True)
                trained.load_state_dict(state)
        ends.append(flat(module))
    return {"exchange_steps": exchange_steps, "conserved": float(conserved.abs().max()),
            "same_after_resume": all(torch.equal(ends[0], e) for e in ends)}  # fmt: skip


def exchange_with_nan_on_rank_0(rank: int, n: int, name: str) -> tuple[int, bool]:
    """Exchanges once while rank 0's model and loss are NaN. Returns (leader, whether this rank's model is finite)."""
    p = nn.Parameter(torch.full((3,), float("nan") if rank == 0 else 1.0))
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), name, world_size=n, comm_period=1)
    p.grad = torch.zeros(3)
    comm.step(loss=float("nan") if rank == 0 else float(rank))
    return comm.dist_optimizer.leader, bool(p.isfinite().all())  # type: ignore[attr-defined]


def exit_before_exchange(rank: int, n: int) -> None:
    """The last rank's process exits when the others exchange."""
    p = torch.ones(3, requires_grad=True)
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), "EASGD", world_size=n, comm_period=1)
    if rank == n - 1:
        os._exit(0)
    p.grad = torch.ones(3)
    comm.step()


def construct_with_options_on_rank_1(rank: int, n: int, options: dict[str, Any], elements: int) -> tuple[str, float]:
    """Makes a CommOptimizer, with these options and so many elements on rank 1 alone. Returns (the error, the sum of 1
    over the ranks by an all_reduce that comes next)."""
    p = torch.zeros(elements if rank == 1 else 3, requires_grad=True)
    given = {"dist_optim_name": "LSGD", "world_size": n, **(options if rank == 1 else {})}
    error_text = ""
    try:
        CommOptimizer(torch.optim.SGD([p], lr=0.1), **given)
    except (ValueError, TypeError, AssemblyError) as error:
        error_text = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)
    return error_text, float(total)
