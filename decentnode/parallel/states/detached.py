"""Copies and pickles of a wrapper: the model as it is now, which takes no part in the exchange."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from decentnode.parallel.states.entry_names import EXTRA


class DetachedModel(Module):
    """A module under the names that it has inside the wrapper, `module.*`: for averages over time, and for files."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the module's entries of a wrapper's state, and ignores its other entries."""
        entries = {name: value for name, value in state_dict.items() if name != EXTRA}
        return super().load_state_dict(entries, strict=strict, assign=assign)
