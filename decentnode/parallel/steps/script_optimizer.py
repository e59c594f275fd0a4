"""The optimizer that a script steps itself, when backward passes do not."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from decentnode.optim.outer import OuterOptimizer

logger = logging.getLogger(__name__)

WARN_AFTER_CHANGES = 10
"""How often parameters may change before the first step until a warning: loading a state, or moving them for a second
pass, causes fewer changes."""


class ScriptOptimizer(OuterOptimizer):
    """An optimizer whose step is a step of the wrapped model: it mixes, updates, and starts the next exchange.

    With a GradScaler (`scaler.step(optimizer)`) a rank whose gradients have an inf or NaN mixes without an update.
    """

    def __init__(self, optimizer: Optimizer, take: Callable[[bool], None]) -> None:
        """take: a bound method, which takes a step with or without an update. Its object is not kept alive."""
        super().__init__(optimizer)
        self._take = weakref.WeakMethod(take)

    @_disable_dynamo  # as torch's own optimizers do: a compiled training step calls it without tracing into it
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step, waiting for the exchange in flight. Raises RuntimeError if the wrapper is closed, PeerLost."""
        result = self.evaluate_closure(closure)
        take = self._take()
        if take is None:
            raise RuntimeError("the wrapper of this optimizer no longer exists: keep a reference to it while its "
                               "model is trained")
        update = not self.found_infinite()
        if update:
            self.unscale(p for group in self.param_groups for p in group["params"])
        take(update)
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.local_optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"ScriptOptimizer({self.local_optimizer!r})"


class ForeignUpdates:
    """Detects that a script trains the parameters without steps of the wrapped model, which ranks would not notice."""

    def __init__(self, params: Sequence[Tensor], step_in_backward: bool) -> None:
        self._params = list(params)
        self._advice = (
            "a backward pass of its loss takes a step, but gradients of torch.autograd.grad and torch.func need "
            "step_in_backward=False" if step_in_backward else
            "with step_in_backward=False, the script must step model.optimizer"
        )  # fmt: skip
        self._version = -1
        self._changes = 0

    def check(self) -> None:
        """Checks for changes; to be called in the training's forward passes before the first step. Warns once."""
        version = sum(p._version for p in self._params)
        self._changes += version != self._version
        self._version = version
        if self._changes == WARN_AFTER_CHANGES:
            self._changes += 1
            logger.warning("the parameters changed but the wrapper took no step, so that this rank trains alone: %s",
                           self._advice)  # fmt: skip
