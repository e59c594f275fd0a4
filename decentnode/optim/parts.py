"""Takes one step of a torch optimizer in several calls, each for some of its parameters."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from decentnode.optim.accum_adam import AccumAdam, AccumAdamW

ONE_BY_ONE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, AccumAdam, AccumAdamW)
"""Optimizers that update each parameter from its own gradient and state alone, and do not write to their groups."""

ParameterGroups = list[dict[str, Any]]


def can_divide_step(optimizer: Optimizer) -> bool:
    """Returns whether several calls of `step`, each with some of the parameters, give bitwise the result of one call.

    False for subclasses, and if `step` has hooks or was replaced, because these would see several calls.
    """
    if type(optimizer) not in ONE_BY_ONE:  # others need not have hooks: some do not call torch's constructor
        return False
    hooks = (getattr(torch_optimizer, "_global_optimizer_pre_hooks", None),
             getattr(torch_optimizer, "_global_optimizer_post_hooks", None),
             optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # fmt: skip
    own = vars(optimizer).get("step")
    untouched = own is None or hasattr(own, "_wrapped_by_lr_sched")  # schedulers only check that there was any call
    return untouched and not any(hooks)


class Division:
    """Divides an optimizer's parameter groups among parts of its parameters, and caches the result: a step compares
    only the groups' lists, unless a parameter was added, removed or moved to another group."""

    def __init__(self, parts: Sequence[Iterable[Tensor]]) -> None:
        """parts: the parameters of each; no parameter may be in two parts."""
        self._part_of = {p: number for number, params in enumerate(parts) for p in params}
        self._count = len(parts)
        self._known: list[list[Tensor]] = []
        """[group] its parameters at the last division."""
        self._shares: list[list[tuple[int, list[Tensor]]]] = []
        """[part] the numbers of its groups, each with the parameters of the part."""

    def groups(self, optimizer: Optimizer) -> list[ParameterGroups]:
        """Returns the current parameter groups of each part; the last entry has the parameters that are in no part.

        A part's groups have the same list `params` in every call as long as nothing has changed.
        """
        lists = [group["params"] for group in optimizer.param_groups]
        same = len(lists) == len(self._known) and all(
            len(now) == len(before) and all(map(operator.is_, now, before))
            for now, before in zip(lists, self._known, strict=True)
        )
        if not same:
            self._divide(lists)
        return [[{**optimizer.param_groups[number], "params": params} for number, params in shares]
                for shares in self._shares]  # fmt: skip

    def _divide(self, lists: list[list[Tensor]]) -> None:
        self._known = [list(params) for params in lists]
        self._shares = [[] for _ in range(self._count + 1)]
        for number, params in enumerate(lists):
            shares: dict[int, list[Tensor]] = {}
            for p in params:
                shares.setdefault(self._part_of.get(p, self._count), []).append(p)
            for part, mine in shares.items():
                self._shares[part].append((number, mine))


@contextlib.contextmanager
def restrict_groups(optimizer: Optimizer, groups: ParameterGroups) -> Iterator[None]:
    """Makes the optimizer have only these groups inside the context."""
    kept, optimizer.param_groups = optimizer.param_groups, groups
    try:
        yield
    finally:
        optimizer.param_groups = kept
