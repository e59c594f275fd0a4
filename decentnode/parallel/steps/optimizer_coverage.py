"""Finds parameters that only the wrapped model or only its optimizer has."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


class OptimizerCoverage:
    """Compares the parameters of an optimizer with those that ranks exchange, again whenever it has more groups."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        """params: those that are exchanged. Raises ValueError if the optimizer has none of them, but others."""
        self._optimizer, self._params = optimizer, list(params)
        self._groups = -1
        self._warned = False
        self.unstepped: list[Tensor] = []
        """Exchanged parameters that the optimizer does not have, whose gradients the wrapper has to clear."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if own and own.isdisjoint(self._params):
            raise ValueError("optimizer must have parameters of the model, got only others: create it from the given "
                             "parameters")  # fmt: skip
        self.check()

    def set_exchanged(self, params: Sequence[Tensor]) -> None:
        """Compares with these exchanged parameters from now on."""
        self._params, self._groups = list(params), -1

    def check(self) -> None:
        """Warns, once, if the optimizer has parameters that are not exchanged, which every rank trains by itself."""
        if len(self._optimizer.param_groups) == self._groups:
            return
        self._groups = len(self._optimizer.param_groups)
        own = [p for group in self._optimizer.param_groups for p in group["params"]]
        known, stepped = set(self._params), set(own)
        self.unstepped = [p for p in self._params if p not in stepped]
        others = sum(p.requires_grad and p not in known for p in own)
        if others and not self._warned:
            self._warned = True
            logger.warning("the optimizer has %d parameters that are not in the wrapped model, or were added later: "
                           "ranks do not exchange these, each trains its own", others)  # fmt: skip
