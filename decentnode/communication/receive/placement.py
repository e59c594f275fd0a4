"""Moves arrived payloads to the device of the models, or copies them to memory of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DevicePlacement:
    """The device placement of one node's payloads. Any thread; needs no lock."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: the device of the models; the CPU when None."""
        self.device = device or torch.device("cpu")
        self.on_cpu = self.device.type == "cpu"
        self.upload: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(self.device)
        """Copies a tensor in host memory to `device`; the tensor may change as soon as this returns."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on the device of the models. If it is a copy, the copy is complete."""
        return tensor if self.is_on_device(tensor) else self.upload(tensor)

    def is_on_device(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies on the device of the models."""
        return tensor.is_cpu if self.on_cpu else tensor.device == self.device

    def to_device_copy(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on the device of the models, always in other memory."""
        placed = self.to_device(tensor)
        return tensor.clone() if placed is tensor else placed
