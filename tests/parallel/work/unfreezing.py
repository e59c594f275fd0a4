"""What ranks do in the tests of parameters that are frozen when they are wrapped and trained later."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentnode.errors import AssemblyError
from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from tests.parallel.work.models import SGD, batch, flat, model

OPTIMIZERS: dict[str, Any] = {
    "sgd": {"optimizer": SGD},
    "adam": {"optimizer": partial(torch.optim.Adam, lr=0.01, fused=True)},
    "adagrad": {"optimizer": partial(torch.optim.Adagrad, lr=0.01)},
    "groups": {"optim_fn": lambda named: torch.optim.SGD([
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named if p.dim() < 2]}], lr=0.05, momentum=0.9)},
}  # fmt: skip


def halves(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(The layers that are frozen at first, the last one.)"""
    assert isinstance(module, nn.Sequential)
    return module[:3], module[4]


def made(optimizer: str, frozen: bool, options: dict[str, Any]) -> DecentralizedDataParallel:
    """frozen: before the wrapping; otherwise right after it."""
    module = model()
    backbone, _ = halves(module)
    if frozen:
        backbone.requires_grad_(False)
    wrapped = DecentralizedDataParallel(module, **OPTIMIZERS[optimizer], **options)
    backbone.requires_grad_(False)
    return wrapped


def train(wrapped: DecentralizedDataParallel, rank: int, first: int, last: int, own: bool) -> None:
    for t in range(first, last):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
        if own:
            wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()


def unfrozen(rank: int, n: int, optimizer: str, options: dict[str, Any], swap: bool) -> tuple[float, float, float]:
    """Beside a wrapper whose layers were frozen after the wrapping: (the largest difference of the models, how far the
    layers have come, consensus distance). swap: the layers that were trained rest when the others begin."""
    own = not options.get("step_in_backward", True)
    models = []
    for frozen in (True, False):
        wrapped = made(optimizer, frozen, options)
        backbone, head = halves(wrapped.module)
        before = flat(backbone)
        train(wrapped, rank, 0, 4, own)
        assert torch.equal(flat(backbone), before)
        backbone.requires_grad_(True)
        head.requires_grad_(not swap)
        train(wrapped, rank, 4, 9, own)
        assert wrapped.steps == 9
        models.append(flat(wrapped.module))
    moved = float((flat(backbone) - before).abs().max())
    return float((models[0] - models[1]).abs().max()), moved, wrapped.consensus_distance()


def mean_is_kept(rank: int, n: int, options: dict[str, Any]) -> tuple[float, float, float]:
    """Steps of rate 0 after the layers were unfrozen, whose values differ by then: (change of the mean over ranks, how
    far ranks differed, how far they do in the end)."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=partial(torch.optim.SGD, lr=0.05), **options)
    backbone, _ = halves(wrapped.module)
    train(wrapped, rank, 0, 8, False)
    backbone.requires_grad_(True)
    train(wrapped, rank, 8, 9, False)
    wrapped.optimizer.param_groups[0]["lr"] = 0.0
    train(wrapped, rank, 9, 16, False)  # what was under way when the rate became 0 has arrived

    def mean() -> Tensor:
        values = flat(wrapped.module)
        dist.all_reduce(values)
        return values / n

    with torch.no_grad():
        for p in backbone.parameters():
            p.add_(rank)
    before, apart = mean(), wrapped.consensus_distance()
    train(wrapped, rank, 16, 64, False)
    return float((mean() - before).abs().max()), apart, wrapped.consensus_distance()


def frozen_model() -> nn.Module:
    module = model()
    halves(module)[0].requires_grad_(False)
    return module


def resumed(rank: int, n: int, all_trained: bool) -> tuple[bool, bool]:
    """A run whose layers were unfrozen, resumed by a wrapper whose layers are all trained, or frozen until after the
    load: (the same bits at once, the same bits after more steps)."""
    first = made("groups", True, {})
    train(first, rank, 0, 3, False)
    halves(first.module)[0].requires_grad_(True)
    train(first, rank, 3, 6, False)
    state = first.state_dict()
    second = DecentralizedDataParallel(model() if all_trained else frozen_model(), **OPTIMIZERS["groups"])
    second.load_state_dict(state)
    same = torch.equal(flat(first.module), flat(second.module))
    halves(second.module)[0].requires_grad_(True)
    for wrapped in (first, second):
        train(wrapped, rank, 6, 9, False)
    return same, torch.equal(flat(first.module), flat(second.module))


def other_parts(rank: int, n: int) -> str:
    """Ranks unfreeze different layers: what is raised."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=SGD, timeout_seconds=20)
    train(wrapped, rank, 0, 2, False)
    wrapped.module[2 * rank].requires_grad_(True)
    try:
        train(wrapped, rank, 2, 3, False)
    except AssemblyError as error:
        return str(error)
    return "nothing"


def loads_another(rank: int, n: int) -> tuple[str, int]:
    """Rank 0 alone loads a state of a run whose layers are all trained; both go on: (what was raised, steps)."""
    states = [DecentralizedDataParallel(made, optimizer=SGD).state_dict() for made in (model(), frozen_model())]
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=SGD, timeout_seconds=20)
    train(wrapped, rank, 0, 2, False)
    told = ""
    try:
        wrapped.load_state_dict(states[rank])
    except AssemblyError as error:
        told = str(error)
    train(wrapped, rank, 2, 4, False)
    return told, wrapped.steps


def one_alone(rank: int, n: int) -> None:
    """Rank 0 alone unfreezes."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=SGD, timeout_seconds=20)
    halves(wrapped.module)[0].requires_grad_(rank == 0)
    train(wrapped, rank, 0, 4, False)


def scaled(rank: int, n: int, direct: bool) -> float:
    """The script's GradScaler with a large scale, and layers that are unfrozen: how far they have come. direct: forward
    passes are not the wrapper's."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=partial(torch.optim.SGD, lr=0.05),
                                        step_in_backward=False)  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    backbone, _ = halves(wrapped.module)
    before = flat(backbone)
    for t in range(4):
        backbone.requires_grad_(t > 1)
        x, y = batch(rank, t)
        loss = ((wrapped.module if direct else wrapped)(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(wrapped.optimizer)
        scaler.update()
        wrapped.optimizer.zero_grad()
    return float((flat(backbone) - before).abs().max())


def comm_unfrozen(rank: int, n: int, name: str) -> tuple[float, float, float]:
    """Beside a CommOptimizer whose layers were frozen after it was made: (the largest difference of the models, how far
    the layers have come, the largest difference of centers between ranks)."""
    models = []
    for frozen in (True, False):
        module = frozen_model() if frozen else model()
        backbone, _ = halves(module)
        before = flat(backbone)
        comm = CommOptimizer(SGD(module.parameters()), name, world_size=n, comm_period=2)
        for t in range(8):
            backbone.requires_grad_(t > 3)
            x, y = batch(rank, t)
            loss = (module(x) - y).square().mean()
            loss.backward()
            comm.step(loss=loss.item())
            comm.zero_grad()
        models.append(flat(module))
    center = flat(module) if name == "DDP" else comm.center
    other = center.clone()
    dist.broadcast(other, 0)
    return (float((models[0] - models[1]).abs().max()), float((flat(backbone) - before).abs().max()),
            float((other - center).abs().max()))  # fmt: skip


def comm_other_parts(rank: int, n: int) -> str:
    """Rank 0 alone unfreezes under gradient averaging: what is raised."""
    module = frozen_model()
    comm = CommOptimizer(SGD(module.parameters()), "DDP", world_size=n)
    halves(module)[0].requires_grad_(rank == 0)
    try:
        module(batch(rank, 0)[0]).sum().backward()
        comm.step()
    except AssemblyError as error:
        return str(error)
    return "nothing"
