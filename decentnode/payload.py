"""What travels between nodes in a round: named tensors, and what receivers must expect of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, dtype


@dataclass(frozen=True)
class Payload:
    """What a rule sends to a neighbor: named 1-D tensors and small scalars, on the model's device."""

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    metadata: frozenset[str] = frozenset()
    """Names of tensors whose bytes count as metadata (indices, masks); all others are data."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a payload as receivers must expect it."""

    dtype: dtype
    max_elements: int
    exact: bool = True
    """Whether every payload has exactly `max_elements`; otherwise it may have fewer."""
