"""Reads what scripts have saved of Decent-DP's optimizers, of which there is one per bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from decentnode.compat.decent_dp import functions
from decentnode.compat.decent_dp.buckets import Named, split
from decentnode.optim.accum_adam import AccumAdam


class GradientOrder:
    """The order in which the parameters' gradients come in the first backward pass."""

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self._named = list(named)
        self._came: dict[int, None] = {}
        numbers = {p: number for number, (_, p) in enumerate(named)}
        came = self._came
        self._hooks = [p.register_post_accumulate_grad_hook(lambda p: came.setdefault(numbers[p])) for _, p in named]

    def stop(self) -> None:
        """To be called at the end of the pass. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def named(self) -> Named:
        """The parameters that have had a gradient, in that order; all, the last first, before any pass."""
        order = self._came if self._came and not self._hooks else reversed(range(len(self._named)))
        return [self._named[number] for number in order]


def load(
    optimizer: Optimizer, scheduler: Any, named: Named, optimizers: Sequence[dict[str, Any]],
    schedulers: Sequence[dict[str, Any]], optim_fn: Callable[[Named], Optimizer], bucket_size_in_mb: float,
) -> None:
    """Fills the state of `optimizer` from states of one optimizer per bucket. Raises ValueError, loading nothing."""
    buckets = list(split(named, bucket_size_in_mb))
    if len(buckets) != len(optimizers):
        raise ValueError(f"optimizers must be those of {len(buckets)} buckets of {bucket_size_in_mb:g} MB, "
                         f"got {len(optimizers)}; bucket_size_in_mb must be that of the saved wrapper")  # fmt: skip
    states: dict[Tensor, dict[str, Any]] = {}
    rates: list[dict[str, Any]] = []
    for number, (bucket, saved) in enumerate(zip(buckets, optimizers, strict=True)):
        names = {p: name for name, p in bucket}
        with functions.as_there():  # a group's parameters are numbered in the order of the groups
            groups = optim_fn(bucket).param_groups
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved["param_groups"]]:
            raise ValueError(f"optimizer {number} must have the groups that optim_fn makes of its bucket")
        for group, theirs in zip(groups, saved["param_groups"], strict=True):
            if group["params"]:
                rates.append(theirs)
            for p, index in zip(group["params"], theirs["params"], strict=True):
                states[p] = _state(optimizer, names[p], p, saved["state"].get(index, {}), theirs)
    for p, state in states.items():
        if state:
            optimizer.state[p] = state
    for group in optimizer.param_groups:
        group.update({key: rates[0][key] for key in ("lr", "initial_lr") if key in rates[0]})
    if scheduler is not None and schedulers:
        if schedulers[0].keys() == scheduler.state_dict().keys():
            scheduler.load_state_dict(schedulers[0])
        else:  # another class of schedule: it goes on in the same step
            scheduler.last_epoch = int(schedulers[0]["last_epoch"])


def _state(optimizer: Optimizer, name: str, p: Tensor, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as `optimizer` keeps it. Raises ValueError if a shape does not fit."""
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != p.shape:
                raise ValueError(f"{key} of {name} must have the shape {tuple(p.shape)}, got {tuple(value.shape)}: the "
                                 "order of the parameters is another; take one backward pass first")  # fmt: skip
            found[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(value)
        else:
            found[key] = value.clone() if isinstance(value, Tensor) else value
    if isinstance(optimizer, AccumAdam) and found:
        found["step"] = int(found["step"])
        for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
            found[key] /= beta  # there the moments are kept already multiplied by it
    return found
