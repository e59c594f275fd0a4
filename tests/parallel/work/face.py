"""What ranks do in the tests of what a user of torch's DistributedDataParallel expects of the wrapper."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from decentnode.errors import AssemblyError
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from tests.parallel.work.models import SGD, batch, flat, model

FUSED = partial(torch.optim.Adam, lr=0.01, fused=True)


def step(wrapped: DecentralizedDataParallel, rank: int, t: int) -> None:
    x, y = batch(rank, t)
    (wrapped(x) - y).square().mean().backward()


def several(rank: int, n: int, transport: str) -> dict[str, Any]:
    """Several findings of one wrapper, so that the ranks need not start again for each."""
    found: dict[str, Any] = {}
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, transport=transport)  # type: ignore[arg-type]
    for t in range(3):
        step(wrapped, rank, t)
    wrapped.global_avg()
    with torch.no_grad():
        found["average's"] = wrapped(batch(0, 9)[0]).tolist()  # still in train mode
    wrapped.revert_global_avg()
    with Join([wrapped]):
        for t in range(2 + 3 * rank):
            step(wrapped, rank, t)
    found["steps"] = wrapped.steps
    found["distance"] = wrapped.consensus_distance()
    state = wrapped.state_dict()
    other = DecentralizedDataParallel(model(), optimizer=SGD, transport=transport)  # type: ignore[arg-type]
    other.load_state_dict(state)
    step(other, rank, 9)
    step(wrapped, rank, 9)
    found["same"] = torch.equal(flat(other.module), flat(wrapped.module))
    if rank == 1:
        state["_extra_state"]["steps"] += 1
    try:
        other.load_state_dict(state)
    except AssemblyError as error:
        found["refused"] = str(error)
    return found


def loads_alone(rank: int, n: int) -> None:
    """Rank 0 loads a state, rank 1 goes on."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, timeout_seconds=20)
    step(wrapped, rank, 0)
    if rank == 0:
        wrapped.load_state_dict(wrapped.state_dict())
    for t in range(1, 4):
        step(wrapped, rank, t)


def scaled(rank: int, n: int) -> tuple[list[bool], float, list[float]]:
    """A GradScaler around a CommOptimizer, with an inf on rank 0 in the second step. (moved in each step, the
    difference from plain steps, scales)."""
    modules = [model(), model()]
    comm, plain = (
        CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), "EASGD", world_size=n, comm_period=2)
        for module in modules
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    moved, scales = [], []
    for t in range(5):
        before = flat(modules[0])
        x, y = batch(rank, t)
        loss = (modules[0](x) - y).square().mean()
        scaler.scale(loss * (float("inf") if rank == 0 and t == 1 else 1.0)).backward()
        if t == 3:
            scaler.unscale_(comm)
        scaler.step(comm, loss=loss.item())
        scaler.update()
        comm.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, flat(modules[0])))
        if t != 1:
            (modules[1](x) - y).square().mean().backward()
            plain.step()
            plain.zero_grad()
    dist.barrier()
    return moved, float((flat(modules[0]) - flat(modules[1])).abs().max()), scales


def kept(rank: int, n: int, folder: str) -> None:
    """Every rank saves its state after three steps."""
    wrapped = DecentralizedDataParallel(model(), optimizer=FUSED, topology="complete")
    for t in range(3):
        step(wrapped, rank, t)
    torch.save(wrapped.state_dict(), f"{folder}/{rank}.pt")


def taken_up(rank: int, n: int, folder: str) -> tuple[bool, int, float]:
    """Every rank loads one of two such states and goes on: (has loaded it, steps in the end, spread of the models)."""
    state = torch.load(f"{folder}/{rank % 2}.pt", weights_only=True)
    wrapped = DecentralizedDataParallel(model(1), optimizer=FUSED, topology="complete")
    wrapped.load_state_dict(state)
    same = all(torch.equal(value, state[f"module.{name}"]) for name, value in wrapped.export().items())
    for t in range(3, 5):
        step(wrapped, rank, t)
    return same, wrapped.steps, wrapped.consensus_distance()
