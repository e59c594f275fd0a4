"""Takes one step of a torch optimizer in several calls, each for some of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from decentnode.optim.accum_adam import AccumAdam, AccumAdamW

ONE_BY_ONE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, AccumAdam, AccumAdamW)
"""Optimizers that update every parameter from its own gradient and state alone, and do not write into groups."""

ParameterGroups = list[dict[str, Any]]


def divisible(optimizer: Optimizer) -> bool:
    """Whether several calls of `step`, each with some of the parameters, have the bits of one call with all.

    False for subclasses, and where `step` has hooks or was replaced, because these would see several calls.
    """
    hooks = (getattr(torch_optimizer, "_global_optimizer_pre_hooks", None),
             getattr(torch_optimizer, "_global_optimizer_post_hooks", None),
             optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # fmt: skip
    own = vars(optimizer).get("step")
    untouched = own is None or hasattr(own, "_wrapped_by_lr_sched")  # schedulers count calls, and only whether any came
    return type(optimizer) in ONE_BY_ONE and untouched and not any(hooks)


def divided(optimizer: Optimizer, part_of: Mapping[Tensor, int], parts: int) -> list[ParameterGroups]:
    """The parameter groups of each part, as they are now; last, those of parameters that are in no part."""
    found: list[ParameterGroups] = [[] for _ in range(parts + 1)]
    for group in optimizer.param_groups:
        shares: dict[int, list[Tensor]] = {}
        for p in group["params"]:
            shares.setdefault(part_of.get(p, parts), []).append(p)
        for number, params in shares.items():
            found[number].append({**group, "params": params})
    return found


@contextlib.contextmanager
def restricted(optimizer: Optimizer, groups: ParameterGroups) -> Iterator[None]:
    """Inside the context, the optimizer has these groups alone."""
    kept, optimizer.param_groups = optimizer.param_groups, groups
    try:
        yield
    finally:
        optimizer.param_groups = kept
