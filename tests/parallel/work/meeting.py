"""What ranks do in the tests of CommOptimizer."""

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


def machines(rank: int, n: int, hosts: list[str]) -> tuple[int, int, int]:
    """Ranks per machine that LSGD and the wrapper count, and LSGD's from torchrun; hosts: [rank] its machine."""
    def local() -> int:
        made = CommOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1), "LSGD", world_size=n)
        return int(made.dist_optimizer.ranks_per_machine)

    told = local()
    del os.environ["LOCAL_WORLD_SIZE"]
    per_machine.boot_id = lambda: hosts[rank]
    return local(), per_machine.ranks_per_machine(), told


def agreed(rank: int, n: int, told: list[str | None], given: dict[int, int]) -> int | str | None:
    """What ranks agree on as the number of ranks per machine, or what is raised; told: [rank] by the environment. Ranks
    0 and 1 are on one machine, 2 and 3 on another."""
    del os.environ["LOCAL_WORLD_SIZE"]
    if (mine := told[rank]) is not None:
        os.environ["LOCAL_WORLD_SIZE"] = mine
    per_machine.boot_id = lambda: f"host {rank // 2}"
    try:
        return per_machine.agreed_per_machine(given.get(rank))
    except (AssemblyError, ValueError) as error:
        return str(error)


def elastic(rank: int, n: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A quadratic without gradients, and a short training, with a CommOptimizer."""
    warnings.simplefilter("error")
    torch.manual_seed(rank)
    still = nn.Parameter(torch.randn(7).to(models.DEVICE))
    start = still.detach().clone()
    local = torch.optim.SGD([still], lr=0.1, momentum=0.9 if name == "EAMSGD" else 0.0)
    comm = CommOptimizer(local, name, world_size=n, comm_period=3, **options)
    total = start.clone()
    if n > 1:
        dist.all_reduce(total)
    found: dict[str, Any] = {"unchanged": torch.equal(start, still), "center": torch.allclose(comm.center, total / n)}
    met = []
    for step in range(9):
        still.grad = torch.zeros_like(still)
        before = still.detach().clone()
        comm.step(loss=float(rank))
        if not torch.equal(before, still):
            met.append(step + 1)
    after = still.detach().clone()
    if n > 1:
        dist.all_reduce(after)
    found["met"] = met
    found["conserved"] = float((after + comm.center - total - total / n).abs().max())
    found["leader"] = getattr(comm.dist_optimizer, "leader", None)
    found["at"] = still.detach().tolist()
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
    found["losses"] = (sum(losses[:3]), sum(losses[-3:]))
    found["lr"] = trained.param_groups[0]["lr"]
    return found


def compiled(rank: int, n: int, name: str) -> tuple[bool, int]:
    """Whether a compiled training step does what one does that is not, and the steps that it took."""
    def step(module: nn.Module, comm: CommOptimizer, t: int) -> None:
        x, y = batch(rank, t)
        comm.zero_grad()
        loss = (module(x) - y).square().mean()
        loss.backward()
        comm.step(loss=loss)

    found = []
    for each in (step, torch.compile(step, backend="eager")):
        module = model()
        comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.05), name, n, comm_period=2)
        for t in range(5):
            each(module, comm, t)
        found.append(flat(module))
    return torch.equal(*found), comm.steps


def overlapped(rank: int, n: int, name: str, period: int) -> dict[str, Any]:
    """Exchanges that fly behind the next steps: when they take effect, and a resume in the middle of one."""
    torch.manual_seed(rank)
    still = nn.Parameter(torch.randn(7))
    local = torch.optim.SGD([still], lr=0.1, momentum=0.9 if name == "EAMSGD" else 0.0)
    comm = CommOptimizer(local, name, world_size=n, comm_period=period, dist_pulling_strength=0.2, overlap=True)
    total = torch.cat([still.detach(), comm.center])
    met = []
    for step in range(9):
        still.grad, before = torch.zeros(7), still.detach().clone()
        comm.step(loss=float(rank))
        if not torch.equal(before, still):
            met.append(step + 1)
    after = torch.cat([still.detach(), comm.center])
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
                state = copy.deepcopy(trained.state_dict())
                trained = CommOptimizer(make(), name, world_size=n, comm_period=period, overlap=True)
                trained.load_state_dict(state)
        ends.append(flat(module))
    return {"met": met, "conserved": float(conserved.abs().max()), "same": all(torch.equal(ends[0], e) for e in ends)}


def diverged(rank: int, n: int, name: str) -> tuple[int, bool]:
    """Rank 0's model and loss are no numbers; (who leads, whether this rank's model is one of numbers)."""
    p = nn.Parameter(torch.full((3,), float("nan") if rank == 0 else 1.0))
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), name, world_size=n, comm_period=1)
    p.grad = torch.zeros(3)
    comm.step(loss=float("nan") if rank == 0 else float(rank))
    return comm.dist_optimizer.leader, bool(p.isfinite().all())  # type: ignore[attr-defined]


def ends_early(rank: int, n: int) -> None:
    """The last rank's process ends where the others exchange."""
    p = torch.ones(3, requires_grad=True)
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.1), "EASGD", world_size=n, comm_period=1)
    if rank == n - 1:
        os._exit(0)
    p.grad = torch.ones(3)
    comm.step()


def refused(rank: int, n: int, options: dict[str, Any], elements: int) -> tuple[str, float]:
    """Only rank 1 has these options and so many parameters. What ranks come to, and a sum over them that is asked for
    next."""
    p = torch.zeros(elements if rank == 1 else 3, requires_grad=True)
    given = {"dist_optim_name": "LSGD", "world_size": n, **(options if rank == 1 else {})}
    told = ""
    try:
        CommOptimizer(torch.optim.SGD([p], lr=0.1), **given)
    except (ValueError, TypeError, AssemblyError) as error:
        told = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)
    return told, float(total)
