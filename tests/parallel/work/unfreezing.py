"""Functions of ranks for the tests of parameters that are frozen when they are wrapped and trained later."""

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


def split_layers(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Returns (the layers that are frozen at first, the last one)."""
    assert isinstance(module, nn.Sequential)
    return module[:3], module[4]


def wrap_and_freeze(optimizer: str, frozen: bool, options: dict[str, Any]) -> DecentralizedDataParallel:
    """Wraps a model and freezes its first layers. frozen: before the wrapping; otherwise right after it."""
    module = model()
    backbone, _ = split_layers(module)
    if frozen:
        backbone.requires_grad_(False)
    wrapped = DecentralizedDataParallel(module, **OPTIMIZERS[optimizer], **options)
    backbone.requires_grad_(False)
    return wrapped


def train(wrapped: DecentralizedDataParallel, rank: int, first: int, last: int, script_steps: bool) -> None:
    for t in range(first, last):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
        if script_steps:
            wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()


def compare_unfreezing(
    rank: int, n: int, optimizer: str, options: dict[str, Any], swap: bool
) -> tuple[float, float, float]:
    """Trains with layers that were frozen before the wrapping, and the same with layers frozen after it; both are
    unfrozen at step 4. Returns (greatest difference between the two, greatest change of the unfrozen layers, consensus
    distance). swap: the last layer is frozen at step 4."""
    script_steps = not options.get("step_in_backward", True)
    models = []
    for frozen in (True, False):
        wrapped = wrap_and_freeze(optimizer, frozen, options)
        backbone, head = split_layers(wrapped.module)
        before = flat(backbone)
        train(wrapped, rank, 0, 4, script_steps)
        assert torch.equal(flat(backbone), before)
        backbone.requires_grad_(True)
        head.requires_grad_(not swap)
        train(wrapped, rank, 4, 9, script_steps)
        assert wrapped.steps == 9
        models.append(flat(wrapped.module))
    moved = float((flat(backbone) - before).abs().max())
    return float((models[0] - models[1]).abs().max()), moved, wrapped.consensus_distance()


def mix_unfrozen_layers(rank: int, n: int, options: dict[str, Any]) -> tuple[float, float, float]:
    """Takes steps of rate 0 after layers were unfrozen whose values differ between the ranks. Returns (greatest change
    of the mean over ranks, consensus distance before, after)."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=partial(torch.optim.SGD, lr=0.05), **options)
    backbone, _ = split_layers(wrapped.module)
    train(wrapped, rank, 0, 8, False)
    backbone.requires_grad_(True)
    train(wrapped, rank, 8, 9, False)
    wrapped.optimizer.param_groups[0]["lr"] = 0.0
    train(wrapped, rank, 9, 16, False)  # exchanges in flight when the rate became 0 arrive here

    def mean() -> Tensor:
        values = flat(wrapped.module)
        dist.all_reduce(values)
        return values / n

    with torch.no_grad():
        for p in backbone.parameters():
            p.add_(rank)
    before, distance = mean(), wrapped.consensus_distance()
    train(wrapped, rank, 16, 64, False)
    return float((mean() - before).abs().max()), distance, wrapped.consensus_distance()


def frozen_model() -> nn.Module:
    """Returns a model whose first layers are frozen."""
    module = model()
    split_layers(module)[0].requires_grad_(False)
    return module


def resume_after_unfreezing(rank: int, n: int, all_trained: bool) -> tuple[bool, bool]:
    """Resumes a run whose layers were unfrozen, with a wrapper whose layers are all trained, or frozen until after the
    load. Returns whether the two have the same bits (after the load, after more steps)."""
    first = wrap_and_freeze("groups", True, {})
    train(first, rank, 0, 3, False)
    split_layers(first.module)[0].requires_grad_(True)
    train(first, rank, 3, 6, False)
    state = first.state_dict()
    second = DecentralizedDataParallel(model() if all_trained else frozen_model(), **OPTIMIZERS["groups"])
    second.load_state_dict(state)
    same = torch.equal(flat(first.module), flat(second.module))
    split_layers(second.module)[0].requires_grad_(True)
    for wrapped in (first, second):
        train(wrapped, rank, 6, 9, False)
    return same, torch.equal(flat(first.module), flat(second.module))


def unfreeze_different_layers(rank: int, n: int) -> str:
    """Unfreezes another layer on each rank. Returns the error."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=SGD, timeout_seconds=20)
    train(wrapped, rank, 0, 2, False)
    wrapped.module[2 * rank].requires_grad_(True)
    try:
        train(wrapped, rank, 2, 3, False)
    except AssemblyError as error:
        return str(error)
    return "nothing"


def load_other_state_on_rank_0(rank: int, n: int) -> tuple[str, int]:
    """Rank 0 loads a state of a run whose layers are all trained, rank 1 one of a run with frozen layers; both train
    on. Returns (the error, steps)."""
    states = [DecentralizedDataParallel(made, optimizer=SGD).state_dict() for made in (model(), frozen_model())]
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=SGD, timeout_seconds=20)
    train(wrapped, rank, 0, 2, False)
    error_text = ""
    try:
        wrapped.load_state_dict(states[rank])
    except AssemblyError as error:
        error_text = str(error)
    train(wrapped, rank, 2, 4, False)
    return error_text, wrapped.steps


def unfreeze_on_rank_0_only(rank: int, n: int) -> None:
    """Rank 0 alone unfreezes layers, and both ranks train."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=SGD, timeout_seconds=20)
    split_layers(wrapped.module)[0].requires_grad_(rank == 0)
    train(wrapped, rank, 0, 4, False)


def train_with_grad_scaler(rank: int, n: int, direct: bool) -> float:
    """Trains with the script's GradScaler, at a large scale, and layers that are unfrozen. Returns their greatest
    change, which shows whether their gradients were unscaled. direct: forward passes call the inner module, not the
    wrapper."""
    wrapped = DecentralizedDataParallel(frozen_model(), optimizer=partial(torch.optim.SGD, lr=0.05),
                                        step_in_backward=False)  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    backbone, _ = split_layers(wrapped.module)
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


def compare_unfreezing_with_comm_optimizer(rank: int, n: int, name: str) -> tuple[float, float, float]:
    """Trains with layers that were frozen before the CommOptimizer was made, and the same with layers frozen after it;
    both are unfrozen at step 4. Returns (greatest difference between the two, greatest change of the unfrozen layers,
    greatest difference of the centers, or models, between ranks)."""
    models = []
    for frozen in (True, False):
        module = frozen_model() if frozen else model()
        backbone, _ = split_layers(module)
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


def unfreeze_on_rank_0_with_averaged_gradients(rank: int, n: int) -> str:
    """Rank 0 alone unfreezes layers, with averaged gradients. Returns the error."""
    module = frozen_model()
    comm = CommOptimizer(SGD(module.parameters()), "DDP", world_size=n)
    split_layers(module)[0].requires_grad_(rank == 0)
    try:
        module(batch(rank, 0)[0]).sum().backward()
        comm.step()
    except AssemblyError as error:
        return str(error)
    return "nothing"
