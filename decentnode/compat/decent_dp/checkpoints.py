"""Reads what scripts have saved of Decent-DP's optimizers, of which there is one per bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from decentnode.compat.decent_dp import functions
from decentnode.compat.decent_dp.buckets import Named, split
from decentnode.optim.accum_adam import AccumAdam


class GradientOrder:
    """The order in which the parameters' gradients come in the first backward pass that ends with a step."""

    def __init__(self, named: Sequence[tuple[str, Parameter]], accumulating: Callable[[], bool]) -> None:
        """accumulating: whether the pass under way only adds up gradients."""
        self._named = list(named)
        self._came: dict[int, None] = {}
        numbers: dict[Tensor, int] = {p: number for number, (_, p) in enumerate(named)}
        came = self._came

        def note(p: Tensor) -> None:
            if not accumulating():
                came.setdefault(numbers[p])

        self._hooks = [p.register_post_accumulate_grad_hook(note) for _, p in named]

    @property
    def known(self) -> bool:
        return not self._hooks

    def stop(self) -> None:
        """To be called at the end of the pass. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def named(self) -> Named:
        """The parameters that had a gradient in that pass, in that order."""
        return [self._named[number] for number in self._came]


@dataclass(frozen=True)
class SavedOptimizers:
    """The states of Decent-DP's optimizers and schedules, one of each per bucket."""

    optimizers: Sequence[dict[str, Any]]
    schedulers: Sequence[dict[str, Any]]
    bucket_size_in_mb: float

    def fill(self, optimizer: Optimizer, named: Named, optim_fn: Callable[[Named], Optimizer]) -> None:
        """Fills the state of `optimizer`, and its learning rates. named: in the order in which gradients come. Raises
        ValueError, loading nothing."""
        buckets = list(split(named, self.bucket_size_in_mb))
        if len(buckets) != len(self.optimizers):
            raise ValueError(f"optimizers must be those of {len(buckets)} buckets of {self.bucket_size_in_mb:g} MB, "
                             f"got {len(self.optimizers)}; bucket_size_in_mb must be that of the saved wrapper")
        states: dict[Tensor, dict[str, Any]] = {}
        groups_of: dict[Tensor, dict[str, Any]] = {}
        for number, (bucket, saved) in enumerate(zip(buckets, self.optimizers, strict=True)):
            names = {p: name for name, p in bucket}
            with functions.as_there():  # a group's parameters are numbered in the order of the groups
                groups = optim_fn(bucket).param_groups
            if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved["param_groups"]]:
                raise ValueError(f"optimizer {number} must have the groups that optim_fn makes of its bucket")
            for group, theirs in zip(groups, saved["param_groups"], strict=True):
                for p, index in zip(group["params"], theirs["params"], strict=True):
                    groups_of[p] = theirs
                    states[p] = _state(optimizer, names[p], p, saved["state"].get(index, {}), theirs)
        for p, state in states.items():
            if state:
                optimizer.state[p] = state
        for group in optimizer.param_groups:
            theirs = next((groups_of[p] for p in group["params"] if p in groups_of), {})
            group.update({key: theirs[key] for key in ("lr", "initial_lr") if key in theirs})

    def fill_schedule(self, optimizer: Optimizer, scheduler: Any) -> None:
        """Brings the schedule to its step, and sets the learning rate where all parameters have one."""
        rates = {group["lr"] for each in self.optimizers for group in each["param_groups"]}
        if len(rates) == 1:
            for group in optimizer.param_groups:
                group["lr"] = next(iter(rates))
        if scheduler is None or not self.schedulers:
            return
        if self.schedulers[0].keys() == scheduler.state_dict().keys():
            scheduler.load_state_dict(copy.deepcopy(self.schedulers[0]))
        else:  # another class of schedule: it goes on in the same step
            scheduler.last_epoch = int(self.schedulers[0]["last_epoch"])


def _state(optimizer: Optimizer, name: str, p: Tensor, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as `optimizer` keeps it. Raises ValueError if a shape does not fit."""
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != p.shape:
                raise ValueError(f"{key} of {name} must have the shape {tuple(p.shape)}, got {tuple(value.shape)}: it "
                                 "was saved of another model, or of other buckets")  # fmt: skip
            found[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(value)
        else:
            found[key] = value.clone() if isinstance(value, Tensor) else value
    if isinstance(optimizer, AccumAdam) and found:
        found["step"] = int(found["step"])
        for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
            found[key] /= beta  # there the moments are kept already multiplied by it
    return found
