"""Payloads: the named tensors and scalars that a node sends to a neighbor, and the specifications that receivers
check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype

SCALAR_BYTES = 8
"""Bytes that each scalar of a payload counts as."""


class PayloadBytes(NamedTuple):
    """The bytes of a payload by purpose; the same on every transport."""

    data: int
    metadata: int


@dataclass(frozen=True)
class Payload:
    """The contents that a sharing rule sends to a neighbor: named 1-D tensors on the model's device, and scalars."""

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    metadata: frozenset[str] = frozenset()
    """Names of tensors whose bytes count as metadata (indices, masks, scales); all others are data."""

    def bytes(self) -> PayloadBytes:
        """Returns the bytes of the tensors by purpose; each scalar counts as SCALAR_BYTES of metadata."""
        data, metadata = 0, SCALAR_BYTES * len(self.scalars)
        for name, tensor in self.tensors.items():
            if name in self.metadata:
                metadata += tensor.nbytes
            else:
                data += tensor.nbytes
        return PayloadBytes(data, metadata)


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and size of one tensor of a payload. Receivers allocate and validate by it."""

    dtype: dtype
    max_elements: int
    exact: bool = True
    """Whether every payload has exactly `max_elements`; otherwise it may have fewer."""


@dataclass(frozen=True)
class ScalarSpec:
    """The type and range of one scalar of a payload. Receivers validate by it."""

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    optional: bool = False
    """Whether a payload may omit it."""
    finite: bool = True
    """Whether NaN and infinity are refused."""

    def accepts(self, value: int | float | None) -> bool:
        """Returns whether a received value is valid. value: None if the payload lacks it."""
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return not self.finite
        return self.low <= value <= self.high
