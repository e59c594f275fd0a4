"""Functions of ranks for the tests of the wrapper's interface, as users of torch's DistributedDataParallel know it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from decentnode.errors import AssemblyError
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from tests.parallel.work.models import SGD, batch, flat, model

FUSED_ADAM = partial(torch.optim.Adam, lr=0.01, fused=True)


def train_step(wrapped: DecentralizedDataParallel, rank: int, t: int) -> None:
    x, y = batch(rank, t)
    (wrapped(x) - y).square().mean().backward()


class ModelOutputs(torch.utils.data.Dataset[torch.Tensor]):
    """What a model returns for the batches of rank 0."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __len__(self) -> int:
        return 3

    def __getitem__(self, t: int) -> torch.Tensor:
        return self.module(batch(0, t)[0]).detach()  # type: ignore[no-any-return]


def average_join_and_load(rank: int, n: int, transport: str) -> dict[str, Any]:
    """Averages, joins with uneven inputs, saves and loads with one wrapper, so that the ranks start only once.

    Returns averaged_output: of the mean model in train mode; steps and distance: after the join; same_after_load:
    whether a wrapper that loaded the state takes a step with the same bits; refusal: the error where rank 1 loads a
    state of another step."""
    results: dict[str, Any] = {}
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, transport=transport)  # type: ignore[arg-type]
    for t in range(3):
        train_step(wrapped, rank, t)
    wrapped.global_avg()
    with torch.no_grad():
        results["averaged_output"] = wrapped(batch(0, 9)[0]).tolist()  # still in train mode
    wrapped.revert_global_avg()
    with Join([wrapped]):
        for t in range(2 + 3 * rank):
            train_step(wrapped, rank, t)
    results["steps"] = wrapped.steps
    results["distance"] = wrapped.consensus_distance()
    state = wrapped.state_dict()
    other = DecentralizedDataParallel(model(), optimizer=SGD, transport=transport)  # type: ignore[arg-type]
    other.load_state_dict(state)
    train_step(other, rank, 9)
    train_step(wrapped, rank, 9)
    results["same_after_load"] = torch.equal(flat(other.module), flat(wrapped.module))
    if rank == 1:
        state["_extra_state"]["steps"] += 1
    try:
        other.load_state_dict(state)
    except AssemblyError as error:
        results["refusal"] = str(error)
    return results


def load_state_on_rank_0_only(rank: int, n: int) -> None:
    """Rank 0 loads a state while rank 1 trains on."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, timeout_seconds=20)
    train_step(wrapped, rank, 0)
    if rank == 0:
        wrapped.load_state_dict(wrapped.state_dict())
    for t in range(1, 4):
        train_step(wrapped, rank, t)


def train_with_grad_scaler(rank: int, n: int) -> tuple[list[bool], float, list[float]]:
    """Trains a CommOptimizer through a GradScaler, with a loss of inf on rank 0 in the second step. Returns (for each
    step whether the parameters changed, difference from training without a scaler, scales)."""
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


def save_states(rank: int, n: int, folder: str) -> None:
    """Each rank saves its state after three steps as FOLDER/RANK.pt."""
    wrapped = DecentralizedDataParallel(model(), optimizer=FUSED_ADAM, topology="complete")
    for t in range(3):
        train_step(wrapped, rank, t)
    torch.save(wrapped.state_dict(), f"{folder}/{rank}.pt")


def resume_with_other_world_size(rank: int, n: int, folder: str) -> tuple[bool, int, float]:
    """Each rank loads one of the two states of `save_states` and takes two more steps. Returns (whether it loaded the
    saved parameters, steps in the end, consensus distance)."""
    state = torch.load(f"{folder}/{rank % 2}.pt", weights_only=True)
    wrapped = DecentralizedDataParallel(model(1), optimizer=FUSED_ADAM, topology="complete")
    wrapped.load_state_dict(state)
    same = all(torch.equal(value, state[f"module.{name}"]) for name, value in wrapped.export().items())
    for t in range(3, 5):
        train_step(wrapped, rank, t)
    return same, wrapped.steps, wrapped.consensus_distance()
