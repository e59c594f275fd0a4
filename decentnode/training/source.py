"""Samples as tensors on the model's device, normalized when a batch is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from decentnode.data.base import Samples

CONVERT_ONCE_BYTES = 1 << 20
"""Inputs that take up to this as float32 are converted at once; larger 8-bit ones stay as they are (a quarter of the
memory, or a mapped file that all nodes share) and a batch costs a few microseconds more."""


class Source:
    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.targets = torch.from_numpy(samples.targets).to(device)
        self._inputs = torch.from_numpy(samples.inputs).to(device)
        self._scale, self._offset, self._ids = samples.scale, samples.offset, samples.ids
        if not self._ids and samples.inputs.size * 4 <= CONVERT_ONCE_BYTES:
            self._inputs = self._normalize(self._inputs)
            self._scale, self._offset = 1.0, 0.0

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def sample_elements(self) -> int:
        return self._inputs[0].numel()

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Model-ready copies of the samples at `indices` [M] int64: inputs [M, *input_shape] float32, or int64 where
        they are ids, and targets [M, *target_shape]."""
        return self._normalize(self._inputs.index_select(0, indices)), self.targets.index_select(0, indices)

    def _normalize(self, inputs: Tensor) -> Tensor:
        if self._ids:
            return inputs.to(torch.int64)
        ready = inputs.to(torch.float32)
        if self._scale != 1.0 or self._offset != 0.0:
            ready = ready * self._scale if ready is inputs else ready.mul_(self._scale)
            ready.add_(self._offset)
        return ready
