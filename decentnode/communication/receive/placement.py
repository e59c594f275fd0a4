"""Where arrived payloads come to lie: on the device of the models, in memory of their own where that matters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DevicePlacement:
    """That of one node's payloads. Any thread; no lock is needed."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: of the models; the CPU when None."""
        self.device = device or torch.device("cpu")
        self.on_cpu = self.device.type == "cpu"
        self.lift: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(self.device)
        """How a tensor in the host's memory comes to `device`; it may change afterwards."""

    def placed(self, tensor: Tensor) -> Tensor:
        """On the device of the models; the copy of one that lies elsewhere is complete."""
        return tensor if self.near(tensor) else self.lift(tensor)

    def near(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device of the models."""
        return tensor.is_cpu if self.on_cpu else tensor.device == self.device

    def copied(self, tensor: Tensor) -> Tensor:
        """As `placed`, in other memory."""
        placed = self.placed(tensor)
        return tensor.clone() if placed is tensor else placed
