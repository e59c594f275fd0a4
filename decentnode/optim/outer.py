"""Optimizers that scripts step in place of a torch optimizer; schedulers, GradScaler and frameworks accept them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class OuterOptimizer(Optimizer):
    """Has the groups and the state of a local optimizer, and a step of its own, of which the local step is a part.

    A subclass defines `step`, which must begin with `evaluate_closure(closure)`, and call `unscale` before it reads
    gradients. `state_dict` and `load_state_dict` call the same hooks as torch's.
    """

    _step_supports_amp_scaling = True  # makes GradScaler always call `step`, with `found_inf` set
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(self, optimizer: Optimizer) -> None:
        """Does not call torch's constructor, which would make groups and state of its own."""
        self.local_optimizer = optimizer
        self.defaults = getattr(optimizer, "defaults", {})  # optimizers around others, of other libraries, may lack it
        self.__setstate__({})  # makes the hooks, as torch's constructor would

    def __getattr__(self, name: str) -> Any:
        """Returns what the local optimizer has beyond torch's interface, such as `train` and `eval` of schedule-free
        optimizers, which frameworks call if they exist."""
        if name.startswith("_") or "local_optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.local_optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.local_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.local_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.local_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.local_optimizer.state = state

    @staticmethod
    def evaluate_closure(closure: Callable[[], Any] | None) -> Any:
        """Returns what the closure of a step returns, None without one."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def found_infinite(self) -> float | None:
        """Returns more than 0 if a GradScaler has found an inf or NaN among the gradients; None without a GradScaler.
        Blocking for a GPU."""
        found = getattr(self, "found_inf", None)
        return None if found is None else float(found)

    @torch.no_grad()
    def unscale(self, params: Iterable[Tensor]) -> None:
        """Divides gradients by the scale of a GradScaler that has not unscaled them, bitwise as a step of the local
        optimizer would: fused ones divide, for all others the scaler multiplies."""
        scale = getattr(self, "grad_scale", None)
        if scale is None or getattr(self, "found_inf", None) is None:
            return
        divides = getattr(self.local_optimizer, "_step_supports_amp_scaling", False)
        inverse = scale.double().reciprocal().float()
        for p in params:
            if p.grad is not None:
                p.grad.div_(scale) if divides else p.grad.mul_(inverse)

    def own_state_dict(self) -> dict[str, Any]:
        """Returns what `state_dict` returns, before hooks change it."""
        return self.local_optimizer.state_dict()

    def load_own_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `own_state_dict` returned."""
        self.local_optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        found = self.own_state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state)
            state = state if changed is None else changed
        self.load_own_state_dict(state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.local_optimizer.zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled, because it is one of many: its "
                        "state_dict() can")  # fmt: skip
