"""What travels between nodes in a round: named tensors, and what receivers must expect of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, dtype

SCALAR_BYTES = 8
"""What a scalar of a payload counts for."""


class PayloadBytes(NamedTuple):
    """What a payload weighs, however it travels."""

    data: int
    metadata: int


@dataclass(frozen=True)
class Payload:
    """What a rule sends to a neighbor: named 1-D tensors and small scalars, on the model's device."""

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    metadata: frozenset[str] = frozenset()
    """Names of tensors whose bytes count as metadata (indices, masks, scales); all others are data."""

    def bytes(self) -> PayloadBytes:
        """Of its tensors, by purpose; scalars are metadata of SCALAR_BYTES each. A function of the payload alone: the
        same number on every transport."""
        data, metadata = 0, SCALAR_BYTES * len(self.scalars)
        for name, tensor in self.tensors.items():
            if name in self.metadata:
                metadata += tensor.nbytes
            else:
                data += tensor.nbytes
        return PayloadBytes(data, metadata)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a payload as receivers must expect it."""

    dtype: dtype
    max_elements: int
    exact: bool = True
    """Whether every payload has exactly `max_elements`; otherwise it may have fewer."""


@dataclass(frozen=True)
class ScalarSpec:
    """One number beside the tensors of a payload as receivers must expect it."""

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    optional: bool = False
    """Whether a payload may be without it."""
    finite: bool = True
    """Whether NaN and infinity are refused."""

    def accepts(self, value: int | float | None) -> bool:
        """value: None where the payload has none."""
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return not self.finite
        return self.low <= value <= self.high
