"""What copies and files of a wrapper are: the model as it is now, which takes no part in the exchange."""

from __future__ import annotations

from typing import Any

from torch.nn import Module


class DetachedModel(Module):
    """A module by the names that it has inside the wrapper, `module.*`: for averages over time, and for files."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
