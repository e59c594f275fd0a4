"""Mixed precision: forward passes in 16 bits, and the scale of the loss that keeps fp16 gradients in range."""

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
"""As torch.amp.GradScaler's: the largest power of two that fp16 nearly reaches."""
LARGEST_SCALE = 2.0**24
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale is doubled, as GradScaler's `growth_interval`."""


def autocast(precision: Precision | None, device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which torch computes in 16 bits where that is safe; one that does nothing without."""
    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def unsupported(error: Exception, precision: Precision | None, device: torch.device) -> EnvironmentFault | None:
    """Returns what to tell the user of an error that torch raised as it has no 16-bit form of a layer (oneDNN's LSTM on
    a CPU, say); None for any other error."""
    text = str(error)
    known = ("could not create a primitive", "not implemented for 'Half'", "not implemented for 'BFloat16'")
    if precision is None or not isinstance(error, RuntimeError) or not any(each in text for each in known):
        return None
    other = "fp16" if precision == "bf16" else "bf16"
    return EnvironmentFault(f"training.amp: this torch cannot compute a layer of the model in {precision} on "
                            f"{device.type}; try {other}, or leave the key out ({text.strip().splitlines()[0]:.200})")


class LossScale:
    """The factor of the loss in fp16 training: a power of two, so that it changes no bit of what it keeps in range."""

    def __init__(self, uid: int) -> None:
        """uid: of the node, for errors."""
        self.uid = uid
        self.scale = FIRST_SCALE
        self._good = 0
        """Steps since the scale last changed."""

    def takes(self, gradients: list[Tensor], loss: Tensor) -> bool:
        """Divide the gradients by the scale, in place. Returns whether all are finite; where not, the scale is halved,
        and the step is to be made again. Waits for the device, once, as GradScaler does. Raises Diverged where the
        scale is 1 already.

        loss: of the step. One that is not finite by itself is no matter of the scale: the step counts as taken, and the
        round ends with it.
        """
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        told, *finite = torch.stack([loss, *torch._foreach_norm(gradients)]).isfinite().tolist()
        if not told:
            return True
        if all(finite):
            self._good += 1
            if self._good >= GROWTH_STEPS and self.scale < LARGEST_SCALE:
                self.scale, self._good = 2.0 * self.scale, 0
            return True
        if self.scale <= 1.0:
            raise Diverged(f"node {self.uid}: a gradient is not finite in fp16, whatever the loss scale; try "
                           "training.amp: bf16, or a smaller learning rate (training.optimizer.lr)")  # fmt: skip
        self.scale, self._good = 0.5 * self.scale, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run goes on from."""
        return {"scale": self.scale, "good": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.scale, self._good = float(state["scale"]), int(state["good"])


class Attempt:
    """What a forward pass changes beside gradients, before a step: random streams, and buffers such as running
    statistics. A step that is made again begins from it."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._buffers = [each.clone() for each in module.buffers()]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def undo(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for each, kept in zip(self._module.buffers(), self._buffers, strict=True):
                each.copy_(kept)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
