"""What the wrapper cannot train with, refused at construction with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau


def check_parameters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for parameters whose elements share memory, as those of `expand` do."""
    for name, p in named:
        if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
            raise ValueError(f"parameter {name} must have memory for each of its elements, got strides {p.stride()} "
                             f"for the shape {tuple(p.shape)}: clone() it first")  # fmt: skip


def check_optimizer(optimizer: Optimizer, scheduler: Any) -> None:
    """Raises ValueError for an optimizer or a scheduler whose step needs what a backward pass's end does not have."""
    if isinstance(optimizer, LBFGS):
        raise ValueError("optimizer must step without a closure: LBFGS evaluates the loss several times in a step, "
                         "which the end of a backward pass cannot")  # fmt: skip
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("lr_scheduler_fn must make a scheduler that steps without a metric, got ReduceLROnPlateau: "
                         "make it of wrapper.optimizer, and step it after each evaluation with a metric that all ranks "
                         "agree on")  # fmt: skip


def refuse_compiled_autograd() -> None:
    """Raises RuntimeError while compiled autograd is on: it drops the callbacks at the end of a backward pass."""
    loaded = sys.modules.get("torch._dynamo.compiled_autograd")
    config = sys.modules.get("torch._dynamo.config")
    if any((getattr(loaded, "compiled_autograd_enabled", False), getattr(loaded, "in_compiled_autograd_region", False),
            getattr(config, "compiled_autograd", False))):  # fmt: skip
        raise RuntimeError("compiled autograd must be off (torch._dynamo.config.compiled_autograd = False): it does "
                           "not tell the end of a backward pass, where the wrapper steps")  # fmt: skip
