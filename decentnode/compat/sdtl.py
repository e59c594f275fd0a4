"""SDTL's `CommOptimizer` with its arguments: scripts that import it from `DistOptimizers` import it from here instead.

The methods are those of decentnode.parallel, which follow the papers. With `faithful=True` they do what SDTL does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from decentnode import parallel
from decentnode.parallel.methods.base import DistOptimizer
from decentnode.parallel.process_group.collectives import wait
from decentnode.parallel.process_group.default_group import device_of_group, num_ranks

EPSILON = 1e-8
"""Added to the running squares of gradients by which EASGD+ weighs the parameters."""


class SDTLMethod(DistOptimizer):
    """What SDTL's methods have in common: forces after the gradient step, and exchanges in the steps k (T - 1) for
    k = 1, 2, 3 and so on, where T is `comm_period` (in every step for T = 1)."""

    def __init__(
        self, local_optimizer: Optimizer, world_size: int, local_pulling_strength: float = 0.0,
        dist_pulling_strength: float = 0.1, comm_period: int = 4, overlap: bool = False,
    ) -> None:
        """The arguments are in SDTL's order. Blocks and raises as the base class."""
        super().__init__(local_optimizer, world_size, dist_pulling_strength, local_pulling_strength, comm_period)
        if overlap:
            raise ValueError("overlap must be False with faithful=True")
        self.before = self.flat_params()
        """[P] the parameters that the method stored last."""

    def begin(self) -> None:
        super().begin()
        self.center = self.before.clone()  # the rank's own model, not the mean of all ranks

    @property
    def communicates(self) -> bool:
        return (self.steps + 1) % max(1, self.comm_period - 1) == 0

    def gradients(self) -> Tensor:
        """Returns the gradients [P], zero where a parameter has none."""
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.params])

    def follow(self, target: Tensor) -> None:
        """Sets x <- x + d, then x <- x + c (center - x); d = c (target [P] - center), which the center gets, too."""
        change = (target - self.center).mul_(self.dist_pulling_strength)
        self.center.add_(change)
        self.pull(self.flat_params().add_(change), 1.0)
        self.pull(self.center, self.dist_pulling_strength)
        self.before = self.flat_params()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"before": self.before.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.before = state["before"].clone()


class EASGD(SDTLMethod):
    """x <- x - c/n (x - center), center <- center + c (mean of x - center)."""

    def comm_train_step(self) -> None:
        mean = self.mean(self.flat_params())
        self.pull(self.center, self.dist_pulling_strength / self.world_size)
        self.center.lerp_(mean, self.dist_pulling_strength)


class EASGDPlus(SDTLMethod):
    """The center moves from the mean after the previous exchange toward a mean weighted by squared gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.squares = torch.zeros_like(self.center)

    def dist_train_step(self, loss: float | None) -> None:
        super().dist_train_step(loss)
        self.squares.mul_(0.9).add_(self.gradients().square(), alpha=0.1)

    def comm_train_step(self) -> None:
        self.center = self.mean(self.before.clone())
        weights = self.squares + EPSILON
        weighted = self.mean(self.flat_params().mul_(weights))
        self.follow(weighted.div_(self.mean(weights)))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"squares": self.squares.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.squares = state["squares"].clone()


class LSGD(SDTLMethod):
    """All ranks move toward the rank whose running product of gradient and step is the smallest; each parameter group
    has its own leader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = self.local_optimizer.param_groups
        self.sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        self.decreases = self.before.new_zeros(len(groups))
        """[number of groups] the running product of each group."""

    def dist_train_step(self, loss: float | None) -> None:
        super().dist_train_step(loss)
        now = self.flat_params()
        product = (self.before - now).mul_(self.gradients())
        self.decreases.mul_(0.9).add_(torch.stack([each.sum() for each in product.split(self.sizes)]), alpha=0.1)
        self.before = now

    def leader_model(self) -> Tensor:
        """Returns [P] the leaders' parameters. Blocking."""
        model = self.before.clone()
        if self.world_size > 1:
            own = self.decreases.to(device_of_group())
            scores = [torch.empty_like(own) for _ in range(self.world_size)]
            wait(dist.all_gather(scores, own, async_op=True))
            leaders = torch.stack(scores).argmin(0).tolist()
            for leader, part in zip(leaders, model.split(self.sizes), strict=True):
                wait(dist.broadcast(part, leader, async_op=True))
        return model

    def comm_train_step(self) -> None:
        self.pull(self.leader_model(), self.dist_pulling_strength)
        self.before = self.flat_params()
        self.center = self.before.clone()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"decreases": self.decreases.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.decreases = state["decreases"].clone()


class LSGDPlus(LSGD):
    """The center moves from the mean of all ranks toward the leaders, and all ranks move toward the center."""

    def comm_train_step(self) -> None:
        self.center = self.mean(self.before.clone())
        self.follow(self.leader_model())


METHODS: dict[str, type[DistOptimizer]] = {"EASGD": EASGD, "EASGD+": EASGDPlus, "LSGD": LSGD, "LSGD+": LSGDPlus}


class CommOptimizer(parallel.CommOptimizer):
    """decentnode.parallel.CommOptimizer with SDTL's arguments, in its order."""

    def __init__(
        self, local_optimizer: Optimizer, dist_optim_name: str = "LSGD", world_size: int | None = None,
        local_pulling_strength: float = 0.0, dist_pulling_strength: float = 0.1, comm_period: int = 4, *,
        faithful: bool = False, **more: Any,
    ) -> None:
        """world_size: the process group's when not given. faithful: EASGD pulls ranks by c / n and the center by c; all
        methods exchange every comm_period - 1 steps and after the gradient step; LSGD follows as SDTL does; DDP is the
        same. more: arguments of the method. Blocks and raises as the base class.
        """
        self._faithful = faithful
        super().__init__(
            local_optimizer, "DDP" if dist_optim_name == "DataParallel" else dist_optim_name,
            num_ranks() if world_size is None else world_size, comm_period, dist_pulling_strength,
            local_pulling_strength, **more,
        )  # fmt: skip

    def _method_class(self, name: str) -> Callable[..., DistOptimizer]:
        found = METHODS.get(str(name).upper()) if self._faithful else None
        return super()._method_class(name) if found is None else found

    def join_hook(self, **more: Any) -> JoinHook:
        if self._faithful and not self.dist_optimizer.keeps_ranks_equal:
            raise ValueError("all ranks must take equally many steps with faithful=True, as SDTL's do")
        return super().join_hook(**more)


__all__ = ["EASGD", "LSGD", "CommOptimizer", "DistOptimizer", "EASGDPlus", "LSGDPlus"]
