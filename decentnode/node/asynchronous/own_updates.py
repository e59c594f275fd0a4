"""What a node's own local steps changed in the newest two rounds."""

from __future__ import annotations

import torch
from torch import Tensor


class OwnUpdates:
    """Model after minus model before the local steps, [P] like the model each. Two tensors, made in the first round."""

    def __init__(self) -> None:
        self.last = self.former = torch.empty(0)
        """Of the newest round, and of the one before it; zeros before the first."""

    def begin(self, model: Tensor) -> None:
        """A round begins. model: before the local steps."""
        if self.last.shape != model.shape:
            self.last, self.former = torch.zeros_like(model), torch.zeros_like(model)
        self.last, self.former = self.former.copy_(model), self.last

    def end(self, model: Tensor) -> None:
        """model: after them."""
        torch.sub(model, self.last, out=self.last)
