"""Functions that make optimizers and schedules, with the signatures that DecentralizedDataParallel expects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import GroupNorm, LayerNorm, Module
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from decentnode.optim.accum_adam import AccumAdam, AccumAdamW

Named = Sequence[tuple[str, Tensor] | tuple[Tensor, str]]
"""Parameters with their names, in either order."""

Betas = tuple[float, float]
SLIGHT_DECAY = 2.0**-15
"""Default weight decay of Decent-DP's functions for Adam and AccumAdam."""

DECAYED = "_decentnode_decay"
"""Attribute of a parameter, set by `tag_parameters`: whether weight decay applies to it."""

_NORMS = (_NormBase, LayerNorm, GroupNorm)


def tag_parameters(model: Module) -> None:
    """Marks the parameters that weight decay applies to: all but biases and those of normalization layers."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(p, DECAYED, not isinstance(module, _NORMS) and not name.endswith("bias") and p.dim() >= 2)


def _tensors(params: Named) -> list[Tensor]:
    return [a if isinstance(a, Tensor) else b for a, b in params]  # type: ignore[misc]


def _fused(params: Named) -> bool | None:
    """Returns True if torch has a fused implementation for these, else None. torch itself does not use it on a CPU."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in _tensors(params)) or None


def parameter_groups(params: Named, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two parameter groups: weights, with weight decay; normalization parameters and biases, without.

    A parameter's tag says which it is; one without a tag counts as a weight if it has two dimensions or more.
    """
    tensors = _tensors(params)
    weights = [p for p in tensors if getattr(p, DECAYED, p.dim() >= 2)]
    others = [p for p in tensors if not getattr(p, DECAYED, p.dim() >= 2)]
    groups = ({"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def optim_fn_adam(
    params: Named, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, weight_decay: float = SLIGHT_DECAY,
    eps: float = 1e-8, *, betas: Betas | None = None,
) -> Optimizer:
    """torch.optim.Adam on `parameter_groups`. betas: both at once, as torch has them, instead of beta1 and beta2."""
    both = (beta1, beta2) if betas is None else betas
    return Adam(parameter_groups(params, weight_decay), lr=lr, betas=both, eps=eps, fused=_fused(params))


def optim_fn_adamw(
    params: Named, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, weight_decay: float = 0.1,
    eps: float = 1e-8, *, betas: Betas | None = None,
) -> Optimizer:
    """torch.optim.AdamW on `parameter_groups`. betas: both at once, as torch has them, instead of beta1 and beta2."""
    both = (beta1, beta2) if betas is None else betas
    return AdamW(parameter_groups(params, weight_decay), lr=lr, betas=both, eps=eps, fused=_fused(params))


def optim_fn_accum_adam(
    params: Named, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = SLIGHT_DECAY, accum_iter: int = 4, *, betas: Betas | None = None,
) -> Optimizer:
    """AccumAdam on `parameter_groups`. betas: both at once, as torch has them, instead of beta1 and beta2."""
    both = (beta1, beta2) if betas is None else betas
    return AccumAdam(parameter_groups(params, weight_decay), lr=lr, betas=both, eps=eps, accum_iter=accum_iter)


def optim_fn_accum_adamw(
    params: Named, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
    weight_decay: float = 0.1, accum_iter: int = 4, *, betas: Betas | None = None,
) -> Optimizer:
    """AccumAdamW on `parameter_groups`. betas: both at once, as torch has them, instead of beta1 and beta2."""
    both = (beta1, beta2) if betas is None else betas
    return AccumAdamW(parameter_groups(params, weight_decay), lr=lr, betas=both, eps=eps, accum_iter=accum_iter)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer, t_max: int, t_warmup: int, cosine_eta_min: float = 1e-6, warmup_decay: float = 0.01,
) -> LambdaLR:
    """Linear from warmup_decay * lr to lr in t_warmup steps, then a cosine down to cosine_eta_min at step t_max.

    Raises ValueError unless 0 <= t_warmup < t_max.
    """
    if not 0 <= t_warmup < t_max:
        raise ValueError(f"t_warmup must be in [0, t_max), got {t_warmup} of {t_max}")

    def factor(start: float, step: int) -> float:
        if step < t_warmup:
            return warmup_decay + (1 - warmup_decay) * step / t_warmup
        done = min(1.0, (step - t_warmup) / (t_max - t_warmup))
        low = cosine_eta_min / start if start > 0 else 0.0
        return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2

    starts = [group["lr"] for group in optimizer.param_groups]
    return LambdaLR(optimizer, [lambda step, start=start: factor(start, step) for start in starts])  # type: ignore[misc]
