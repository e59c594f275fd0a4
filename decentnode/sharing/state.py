"""Rules that keep tensors between rounds: their state for checkpoints."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor


class Tensors:
    """Mixin: the attributes named in TENSORS (a tensor or None) are the rule's state."""

    TENSORS: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Copies of what is there already."""
        found = {name: getattr(self, name) for name in self.TENSORS}
        return {name: tensor.clone() for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for names that are not this rule's."""
        unknown = sorted(set(state) - set(self.TENSORS))
        if unknown:
            raise ValueError(f"state of {type(self).__name__} must have {self.TENSORS}, got {unknown}")
        for name in self.TENSORS:
            setattr(self, name, state[name].clone() if name in state else None)
