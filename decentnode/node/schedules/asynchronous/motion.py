"""How a node's model moves from round to round."""

from __future__ import annotations

import torch
from torch import Tensor

NEWEST = 0.2
"""The weight of the newest round in the average. With 1, models that swing around each other would be moved on as they
swing: on a ring whose links take a whole round they never came together."""


class Motion:
    """What changes from the end of one round's local steps to that of the next one's, by steps and by mixing: an
    exponential moving average over rounds. Two tensors as large as the model, made in the first round."""

    def __init__(self) -> None:
        self.mean = self._model = torch.empty(0)
        """[P]; zeros in the first round."""

    def follow(self, model: Tensor) -> None:
        """model: [P], after the local steps of a round."""
        if self._model.shape != model.shape:
            self._model, self.mean = model.clone(), torch.zeros_like(model)
        else:
            self.mean.lerp_(self._model.sub_(model).neg_(), NEWEST)
            self._model.copy_(model)
