"""Functions of ranks that compare trainings whose script takes the steps with those whose backward passes do."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim.lr_scheduler import StepLR

from decentnode.parallel import DecentralizedDataParallel
from tests.parallel.work import models
from tests.parallel.work.models import SGD, UnusualParameters, batch, flat, model

ADAM = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)


def wrap_model(kind: str, **options: Any) -> DecentralizedDataParallel:
    torch.manual_seed(0)
    module = UnusualParameters() if kind == "odd" else model()
    return DecentralizedDataParallel(module, optimizer=ADAM if kind == "adam" else SGD, **options)


def backward(wrapped: nn.Module, rank: int, t: int, scaler: Any = None) -> None:
    x, y = batch(rank, t)
    loss = (wrapped(x) - y).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def compare_ways_of_stepping(rank: int, n: int, kind: str, options: dict[str, Any]) -> tuple[bool, int, float]:
    """Trains in both ways. Returns (whether they have the same bits, steps, consensus distance)."""
    halving = functools.partial(StepLR, step_size=3, gamma=0.5)
    automatic = wrap_model(kind, lr_scheduler_fn=halving, grad_clip_norm=0.5, **options)
    for t in range(8):
        with automatic.no_sync():
            backward(automatic, rank, 2 * t)
        backward(automatic, rank, 2 * t + 1)
    expected = flat(automatic.module)
    automatic.close()
    wrapped = wrap_model(kind, step_in_backward=False, **options)
    schedule = halving(wrapped.optimizer)
    for t in range(8):
        wrapped.optimizer.zero_grad()
        backward(wrapped, rank, 2 * t)
        backward(wrapped, rank, 2 * t + 1)
        nn.utils.clip_grad_norm_([p for p in wrapped.parameters() if p.requires_grad], 0.5)
        wrapped.optimizer.step()
        schedule.step()
    same = torch.equal(flat(wrapped.module), expected)
    result = same, wrapped.steps, wrapped.consensus_distance()
    wrapped.close()
    return result


def compare_grad_scalers(rank: int, n: int, unscales: bool) -> bool:
    """Returns whether the script's own GradScaler gives the bits of one that the wrapper steps, where rank 0 overflows
    in one step. unscales: the script calls unscale_ itself."""
    ends = []
    for automatic in (True, False):
        scaler = torch.amp.GradScaler(models.DEVICE.type, init_scale=2.0**10)
        given: dict[str, Any] = {"scaler": scaler} if automatic else {"step_in_backward": False}
        wrapped = wrap_model("sgd", topology="ring", grad_clip_norm=0.5, **given)
        optimizer = wrapped.optimizer
        for t in range(6):
            if t == 3 and rank == 0:
                handle = next(wrapped.module.parameters()).register_hook(lambda g: g * float("inf"))
            backward(wrapped, rank, t, scaler)
            if t == 3 and rank == 0:
                handle.remove()
            if not automatic:
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert wrapped.steps == 6 and scaler.get_scale() == (2.0**9 if rank == 0 else 2.0**10)
        ends.append(flat(wrapped.module))
        wrapped.close()
    return torch.equal(*ends)


def join_with_uneven_inputs(rank: int, n: int) -> tuple[int, list[float]]:
    """Trains inside torch's Join, with fewer batches on rank 0. Returns (steps, the mean model)."""
    wrapped = wrap_model("sgd", topology="ring", step_in_backward=False)
    with Join([wrapped]):
        for t in range(4 + 3 * rank):
            wrapped.optimizer.zero_grad()
            backward(wrapped, rank, t)
            wrapped.optimizer.step()
    wrapped.global_avg(will_revert=False)
    result = wrapped.steps, flat(wrapped.module).tolist()
    wrapped.close()
    return result


def resume_and_compare(rank: int, n: int) -> bool:
    """Returns whether a training that is saved and loaded in the middle has the bits of one that is not."""
    ends = []
    for cut in (-1, 5):
        wrapped = wrap_model("adam", step_in_backward=False, topology="ring")
        for t in range(9):
            if t == cut:
                state = {name: value.clone() if isinstance(value, Tensor) else value
                         for name, value in wrapped.state_dict().items()}  # fmt: skip
                wrapped.close()
                wrapped = wrap_model("adam", step_in_backward=False, topology="ring")
                wrapped.load_state_dict(state)
            backward(wrapped, rank, t)
            wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()
        ends.append(flat(wrapped.module))
        wrapped.close()
        dist.barrier()
    return torch.equal(*ends)
