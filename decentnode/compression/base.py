"""The contract of a value codec: 1-D float tensors to fewer bytes and back."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from decentnode.compression import CODECS
from decentnode.config.component import Component, Config, load_class
from decentnode.errors import PeerFault
from decentnode.payload import TensorSpec


class Codec(Component, abc.ABC):
    """A pure function of its configuration: no state between calls. Works on the device of what it is given.

    Empty tensors are fine. NaN and infinity come back as something that is not finite; whatever is finite comes back
    finite, at most the largest value of its dtype, however the codec rounds.
    """

    elementwise: ClassVar[bool] = False
    """encode gives one tensor "q" with one element per value, and any slice of it decodes alone."""
    metadata: ClassVar[frozenset[str]] = frozenset()
    """Names of coded tensors whose bytes count as metadata."""
    unbiased: bool = False
    """The mean of what is decoded is the value, over the draws."""
    variance: float = 0.0
    """Bound on E||decoded - v||^2 / ||v||^2 where `unbiased`; 0 for codecs that need no care."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def lossy(self) -> Codec | None:
        """The codec that takes something away: this one, the one within it, or none."""
        return self

    @abc.abstractmethod
    def schema(self, count: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """The coded tensors of `count` values: their exact sizes, or bounds where a spec is not `exact`."""

    @abc.abstractmethod
    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:
        """values: [K] float, not modified. draws: on the same device; needed where `unbiased`."""

    @abc.abstractmethod
    def decode(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        """[count] of dtype. Raises PeerFault("malformed_payload") for what no encoder made."""

    def check(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> None:
        """Raises PeerFault unless the coded tensors have the sizes that `count` values give."""
        for name, spec in self.schema(count, dtype).items():
            size = coded[name].numel() if name in coded else -1
            if size != spec.max_elements if spec.exact else not 0 <= size <= spec.max_elements:
                raise PeerFault("malformed_payload", f"{name} of {count} values has {size} elements")


@functools.cache
def largest_shared(a: torch.dtype, b: torch.dtype) -> float:
    """The largest number that both floating-point formats have: so many leading bits, so large an exponent."""
    ends = [torch.finfo(dtype) for dtype in (a, b)]
    exponent = min(math.frexp(end.max)[1] for end in ends)
    return math.ldexp(1.0 - max(end.eps for end in ends) / 2, exponent)


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values as dtype, finite ones beyond its range as the largest it has; no copy where it is their dtype.

    Values that a format of fewer bits but more range (bfloat16 of float16) would round up beyond the range that they
    came from become the largest of both, so that they come back finite.
    values: what a core's cache holds, such as a block of `tensors.blocks`, as they are read twice.
    """
    limit = largest_shared(values.dtype, dtype)
    if values.numel() and limit < torch.finfo(values.dtype).max:
        low, high = torch.aminmax(values)
        if not -limit <= float(low) <= float(high) <= limit:  # NaN and infinity stay what they are
            values = values.clamp(-limit, limit).where(values.isfinite(), values)
    return values.to(dtype)


def make_codec(config: Config) -> Codec:
    """Raises EnvironmentFault when the codec's library is not installed."""
    made: Codec = load_class(config.name, CODECS, "compression")(config)
    return made
