"""The checkpoint state of rules that keep tensors between rounds."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from decentnode.sharing.base import Sharing
from decentnode.sharing.hooks import Hooks
from decentnode.sharing.wrapper import Wrapper


class Tensors:
    """A mixin whose state consists of the attributes named in TENSORS, each a tensor or None."""

    TENSORS: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of those attributes that are tensors."""
        found = {name: getattr(self, name) for name in self.TENSORS}
        return {name: tensor.clone() for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises ValueError for names that are not in TENSORS."""
        unknown = sorted(set(state) - set(self.TENSORS))
        if unknown:
            raise ValueError(f"state of {type(self).__name__} must have {self.TENSORS}, got {unknown}")
        for name in self.TENSORS:
            setattr(self, name, state[name].clone() if name in state else None)


class TensorsAndRate(Tensors):
    """A mixin whose state is that of `Tensors` and the last learning rate that was not 0."""

    lr = 0.0
    """The last learning rate that was not 0; 0 before the first, and after a checkpoint that lacks it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({name: each for name, each in state.items() if name != "lr"})
        self.lr = float(state.get("lr", 0.0))


MAX_RISE = 2.0
"""By how much the step along a momentum grows at most from one round to the next: a linear warm-up at most doubles the
rate, and so remains the paper's."""


class MomentumAndRate(TensorsAndRate):
    """A mixin for a rule whose tensor `momentum` has the unit of gradients."""

    momentum: Tensor | None

    def limit_momentum(self, lr: float) -> None:
        """Makes the momentum smaller if its step would grow by more than MAX_RISE, and notes the learning rate."""
        if lr > 0:
            if self.momentum is not None and 0 < MAX_RISE * self.lr < lr:
                self.momentum.mul_(MAX_RISE * self.lr / lr)
            self.lr = lr


def left_out(rule: Sharing) -> list[str]:
    """Returns the names, as Class.name, of tensor attributes that checkpoints leave out because the rule does not
    implement `state_dict`. A rule whose tensors are only needed within a round declares this by deriving from `Tensors`
    with empty TENSORS."""
    while isinstance(rule, Wrapper):
        rule = rule.rule
    if type(rule).state_dict is not Hooks.state_dict:
        return []
    return sorted(f"{type(rule).__name__}.{name}" for name, value in vars(rule).items() if isinstance(value, Tensor))
