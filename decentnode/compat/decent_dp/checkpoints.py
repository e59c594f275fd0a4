"""Loads saved states of Decent-DP's optimizers, of which it has one per bucket."""

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
from decentnode.compat.decent_dp.buckets import BucketSteps, Named, split
from decentnode.optim.accum_adam import AccumAdam
from decentnode.optim.saved import NO_OPTIONS, check_state_matches
from decentnode.parallel.states.wrapper_state import load_scheduler

UNCHANGED = "as it is"
"""Stands for a state that a file does not have: the wrapper keeps its own."""


class GradientOrder:
    """The order in which the parameters' gradients arrive in the first backward pass that ends with a step."""

    def __init__(self, named: Sequence[tuple[str, Parameter]], accumulating: Callable[[], bool]) -> None:
        """accumulating: returns whether the current backward pass only accumulates gradients."""
        self._named = list(named)
        self._arrived: dict[int, None] = {}
        numbers: dict[Tensor, int] = {p: number for number, (_, p) in enumerate(named)}
        arrived = self._arrived

        def note(p: Tensor) -> None:
            if not accumulating():
                arrived.setdefault(numbers[p])

        self._hooks = [p.register_post_accumulate_grad_hook(note) for _, p in named]

    @property
    def known(self) -> bool:
        return not self._hooks

    def stop(self) -> None:
        """Stops recording; to be called at the end of the pass. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def params_named(self, names: Sequence[str]) -> Named:
        """Returns the parameters of these names. Raises ValueError for a name that this run does not have."""
        params = dict(self._named)
        for name in names:
            if name not in params:
                raise ValueError(f"the saved run must have the parameters of this one, got {name}")
        return [(name, params[name]) for name in names]

    def adopt(self, names: Sequence[str]) -> None:
        """Replaces the recorded order by that of another run."""
        numbers = {name: number for number, (name, _) in enumerate(self._named)}
        self.stop()
        self._arrived.clear()
        self._arrived.update(dict.fromkeys(numbers[name] for name in names))

    def named(self) -> Named:
        """Returns the parameters that had a gradient in that pass, in that order."""
        return [self._named[number] for number in self._arrived]


@dataclass(frozen=True)
class SavedOptimizers:
    """The states of optimizers and schedulers, one of each per bucket: Decent-DP's, or this wrapper's with
    `faithful=True`."""

    optimizers: Sequence[dict[str, Any]]
    schedulers: Sequence[dict[str, Any]]
    bucket_size_in_mb: float
    is_decent_dp: bool = True
    """Whether they are Decent-DP's, whose AccumAdam stores different moments."""

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizers[0]["param_groups"][0]["lr"])

    def fill(self, optimizer: Optimizer, named: Named, optim_fn: Callable[[Named], Optimizer]) -> None:
        """Loads the state of `optimizer`, and its learning rates. named: in the order of their gradients. Raises
        ValueError, having loaded nothing."""
        groups_of = self._load_states([optimizer], named, optim_fn)
        for group in optimizer.param_groups:
            theirs = next((groups_of[p] for p in group["params"] if p in groups_of), {})
            group.update({key: theirs[key] for key in ("lr", "initial_lr") if key in theirs})

    def fill_buckets(self, made: BucketSteps, named: Named, optim_fn: Callable[[Named], Optimizer]) -> None:
        """Loads the optimizers and schedules of `made`, which were made for `named` and may have buckets of another
        size. Raises ValueError."""
        groups_of = self._load_states(made.optimizers, named, optim_fn)
        for optimizer in made.optimizers:
            for group in optimizer.param_groups:
                theirs = next((groups_of[p] for p in group["params"]), {})
                group.update({key: copy.deepcopy(value) for key, value in theirs.items() if key not in NO_OPTIONS})
        for number, scheduler in enumerate(made.schedulers):
            if scheduler is not None and self.schedulers:
                alike = len(self.schedulers) == len(made.schedulers)
                load_scheduler(scheduler, self.schedulers[number if alike else 0])

    def _load_states(
        self, optimizers: Sequence[Optimizer], named: Named, optim_fn: Callable[[Named], Optimizer]
    ) -> dict[Tensor, dict[str, Any]]:
        """Loads the states of optimizers, which together have these parameters; returns each parameter's saved group.
        Raises ValueError, having loaded nothing."""
        buckets = list(split(named, self.bucket_size_in_mb))
        if len(buckets) != len(self.optimizers):
            raise ValueError(f"optimizers must be those of {len(buckets)} buckets of {self.bucket_size_in_mb:g} MB, "
                             f"got {len(self.optimizers)}; bucket_size_in_mb must be that of the saved wrapper")
        owner = {p: each for each in optimizers for group in each.param_groups for p in group["params"]}
        states: dict[Tensor, dict[str, Any]] = {}
        groups_of: dict[Tensor, dict[str, Any]] = {}
        for number, (bucket, saved) in enumerate(zip(buckets, self.optimizers, strict=True)):
            names = {p: name for name, p in bucket}
            with functions.as_there():  # saved groups number their parameters in Decent-DP's order
                made = optim_fn(bucket)
            try:
                check_state_matches(made, saved)
            except ValueError as error:
                raise ValueError(f"of bucket {number}, {error}") from error
            for group, theirs in zip(made.param_groups, saved["param_groups"], strict=True):
                for p, index in zip(group["params"], theirs["params"], strict=True):
                    groups_of[p] = theirs
                    found = saved["state"].get(index, {})
                    states[p] = _state(names[p], p, found, owner[p], theirs if self.is_decent_dp else None)
        for p, state in states.items():
            if state:
                owner[p].state[p] = state
        return groups_of

    def fill_schedule(self, optimizer: Optimizer, scheduler: Any) -> None:
        """Sets the schedule to its saved step, and the learning rate if all parameters have the same."""
        rates = {group["lr"] for each in self.optimizers for group in each["param_groups"]}
        if len(rates) == 1:
            for group in optimizer.param_groups:
                group["lr"] = next(iter(rates))
        if scheduler is None or not self.schedulers:
            return
        if self.schedulers[0].keys() == scheduler.state_dict().keys():
            scheduler.load_state_dict(copy.deepcopy(self.schedulers[0]))
        else:  # another class of schedule: it continues from the same step
            scheduler.last_epoch = int(self.schedulers[0]["last_epoch"])


def _state(
    name: str, p: Tensor, saved: dict[str, Any], optimizer: Optimizer, group: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns a parameter's state as `optimizer` stores it. group: the saved group, if the state is Decent-DP's. Raises
    ValueError if a shape does not fit."""
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != p.shape:
                raise ValueError(f"{key} of {name} must have the shape {tuple(p.shape)}, got {tuple(value.shape)}: it "
                                 "was saved of another model, or of other buckets")  # fmt: skip
            found[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(value)
        else:
            found[key] = value.clone() if isinstance(value, Tensor) else value
    if isinstance(optimizer, AccumAdam) and found and group is not None:
        found["step"] = int(found["step"])
        for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
            found[key] /= beta  # Decent-DP stores the moments multiplied by beta
    return found
