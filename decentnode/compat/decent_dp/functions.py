"""Functions that make optimizers and schedules, with Decent-DP's names and arguments.

They are those of decentnode.optim, unless a wrapper with `faithful=True` calls them, or the script calls them inside
`as_there`: then parameters are grouped, and schedules run, as in Decent-DP 0.2.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from decentnode.optim import functions as ours
from decentnode.optim.accum_adam import AccumAdam, AccumAdamW

NamedParameters = list[tuple[str, Tensor]]

_as_there: ContextVar[bool] = ContextVar("as_there", default=False)


@contextlib.contextmanager
def as_there(enable: bool = True) -> Iterator[None]:
    """Makes the functions of this module behave as in Decent-DP inside the context."""
    token = _as_there.set(enable)
    try:
        yield
    finally:
        _as_there.reset(token)


def _groups(params: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Returns Decent-DP's two groups: weight decay applies only to parameters with "bn" or "bias" in their names."""
    named = [("bn" in name or "bias" in name, p) for name, p in params]
    return [{"params": [p for decayed, p in named if decayed is which], "weight_decay": weight_decay if which else 0.0}
            for which in (False, True)]  # fmt: skip


def optim_fn_adam(
    params: NamedParameters, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999,
    weight_decay: float = ours.SLIGHT_DECAY, eps: float = 1e-8,
) -> Optimizer:
    """torch.optim.Adam with weight decay on weights, not on norms and biases."""
    if _as_there.get():
        return Adam(_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)
    return ours.optim_fn_adam(params, lr, beta1, beta2, weight_decay, eps)


def optim_fn_adamw(
    params: NamedParameters, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> Optimizer:
    """torch.optim.AdamW with weight decay on weights, not on norms and biases."""
    if _as_there.get():
        return AdamW(_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)
    return ours.optim_fn_adamw(params, lr, beta1, beta2, weight_decay, eps)


def optim_fn_accum_adam(
    params: NamedParameters, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = ours.SLIGHT_DECAY, accum_iter: int = 4,
) -> Optimizer:
    """AccumAdam with weight decay on weights, not on norms and biases."""
    if _as_there.get():
        return AccumAdam(_groups(params, weight_decay), lr, (beta1, beta2), eps, 0.0, accum_iter)
    return ours.optim_fn_accum_adam(params, lr, beta1, beta2, eps, weight_decay, accum_iter)


def optim_fn_accum_adamw(
    params: NamedParameters, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = 0.1, accum_iter: int = 4,
) -> Optimizer:
    """AccumAdamW with weight decay on weights, not on norms and biases."""
    if _as_there.get():
        return AccumAdamW(_groups(params, weight_decay), lr, (beta1, beta2), eps, 0.0, accum_iter)
    return ours.optim_fn_accum_adamw(params, lr, beta1, beta2, eps, weight_decay, accum_iter)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer, t_max: int, t_warmup: int, cosine_eta_min: float = 1e-6, warmup_decay: float = 0.01,
) -> LRScheduler:
    """Linear from warmup_decay * lr to lr in t_warmup steps, then a cosine down to cosine_eta_min at step t_max; as in
    Decent-DP, at step t_warmup + t_max."""
    if not _as_there.get():
        return ours.lr_scheduler_fn_cosine_with_warmup(optimizer, t_max, t_warmup, cosine_eta_min, warmup_decay)
    cosine = CosineAnnealingLR(optimizer, T_max=t_max, eta_min=cosine_eta_min)
    warm = LinearLR(optimizer, start_factor=warmup_decay, total_iters=t_warmup)
    return SequentialLR(optimizer, [warm, cosine], [t_warmup])
