"""Tracks how a node's model moves from round to round."""

from __future__ import annotations

import torch
from torch import Tensor

NEWEST_WEIGHT = 0.2
"""The weight of the newest round in the moving average. With 1, the correction amplifies models that oscillate around
each other: on a ring whose links take a whole round they never reached consensus."""


class Motion:
    """An exponential moving average of the model's change per round, from the end of one round's local steps to the end
    of the next one's, by local steps and mixing together. Keeps two tensors as large as the model, allocated in the
    first round."""

    def __init__(self) -> None:
        self.mean = self._model = torch.empty(0)
        """[P] the moving average of the change per round; zeros in the first round."""

    def update(self, model: Tensor) -> None:
        """Update the average. model: [P] the model after the local steps of a round."""
        if self._model.shape != model.shape:
            self._model, self.mean = model.clone(), torch.zeros_like(model)
        else:
            self.mean.lerp_(self._model.sub_(model).neg_(), NEWEST_WEIGHT)
            self._model.copy_(model)
