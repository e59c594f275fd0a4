"""Mixed precision: forward passes in 16 bits, and the loss scale that keeps fp16 gradients in range."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decentnode.errors import Diverged, EnvironmentFault

Precision = Literal["bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

FIRST_SCALE = 2.0**16
"""The initial loss scale, as in torch.amp.GradScaler: the smallest power of two beyond fp16's range."""
LARGEST_SCALE = 2.0**24
GROWTH_STEPS = 2000
"""The number of steps without an overflow after which the scale is doubled, as GradScaler's `growth_interval`."""


def autocast(precision: Precision | None, device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which torch computes in 16 bits where that is safe. precision: None gives a context that
    does nothing."""
    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def unsupported(error: Exception, precision: Precision | None, device: torch.device) -> EnvironmentFault | None:
    """Returns an error message for the user if torch raised `error` because it has no 16-bit implementation of a layer
    (such as oneDNN's LSTM on a CPU); None for any other error."""
    text = str(error)
    known = ("could not create a primitive", "not implemented for 'Half'", "not implemented for 'BFloat16'")
    if precision is None or not isinstance(error, RuntimeError) or not any(each in text for each in known):
        return None
    other = "fp16" if precision == "bf16" else "bf16"
    return EnvironmentFault(f"training.amp: this torch cannot compute a layer of the model in {precision} on "
                            f"{device.type}; try {other}, or leave the key out ({text.strip().splitlines()[0]:.200})")


class LossScale:
    """The factor by which the loss is multiplied in fp16 training. It is a power of two, so that it does not change the
    significant bits of gradients."""

    def __init__(self, uid: int) -> None:
        """uid: the node's uid, for error messages."""
        self.uid = uid
        self.scale = FIRST_SCALE
        self._steps_since_change = 0
        """The number of steps since the scale last changed."""

    def unscale_and_check(self, gradients: list[Tensor], loss: Tensor) -> bool:
        """Divide the gradients by the scale, in place. Returns whether all of them are finite; if not, the scale is
        halved, and the step must be repeated. Waits once for the device, as GradScaler does. Raises Diverged if
        gradients overflow at a scale of 1.

        loss: the step's loss. If it is not finite, the scale is not the cause: the step is accepted, and the round then
        fails because of the loss.
        """
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        loss_is_finite, *finite = torch.stack([loss, *torch._foreach_norm(gradients)]).isfinite().tolist()
        if not loss_is_finite:
            return True
        if all(finite):
            self._steps_since_change += 1
            if self._steps_since_change >= GROWTH_STEPS and self.scale < LARGEST_SCALE:
                self.scale, self._steps_since_change = 2.0 * self.scale, 0
            return True
        if self.scale <= 1.0:
            raise Diverged(f"node {self.uid}: a gradient is not finite in fp16, whatever the loss scale; try "
                           "training.amp: bf16, or a smaller learning rate (training.optimizer.lr)")  # fmt: skip
        self.scale, self._steps_since_change = 0.5 * self.scale, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a resumed run continues."""
        return {"scale": self.scale, "good": self._steps_since_change}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.scale, self._steps_since_change = float(state["scale"]), int(state["good"])


class StepSnapshot:
    """A snapshot, taken before a step, of what a forward pass changes besides gradients: random generators, and buffers
    such as running statistics. A step that is repeated starts from it."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._buffers = [each.clone() for each in module.buffers()]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Restore the snapshot."""
        with torch.no_grad():
            for each, kept in zip(self._module.buffers(), self._buffers, strict=True):
                each.copy_(kept)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
