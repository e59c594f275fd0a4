"""The contract of a codec, which encodes 1-D floating-point tensors into fewer bytes and decodes them."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from decentnode.compression import CODECS
from decentnode.config.component import Component, Config, load_class
from decentnode.errors import PeerFault
from decentnode.payload import TensorSpec
from decentnode.tensors import known_all


class Codec(Component, abc.ABC):
    """Encodes and decodes values. Has no state between calls, and works on the device of the tensors it is given.

    Tensors may be empty. NaN and infinity decode to a value that is not finite; a finite value decodes to a finite one,
    however the codec rounds: at most the largest value of its dtype.
    """

    elementwise: ClassVar[bool] = False
    """Whether `encode` returns one tensor "q" with one element per value, any slice of which can be decoded alone."""
    metadata: ClassVar[frozenset[str]] = frozenset()
    """Names of coded tensors whose bytes count as metadata."""
    unbiased: bool = False
    """Whether the expectation of a decoded value, over the random draws, is the value itself."""
    variance: float = 0.0
    """Upper bound of E||decoded - v||^2 / ||v||^2 if `unbiased`; 0 if rules need not take it into account."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def lossy(self) -> Codec | None:
        """The lossy codec: this one, or the one that a lossless codec contains, or None."""
        return self

    def divided(self, sizes: Sequence[int]) -> Codec:  # noqa: ARG002
        """Returns this codec for vectors that consist of tensors of these sizes; no two tensors share a scale.

        Both ends know the sizes from their own model, never from a message.
        """
        return self

    @abc.abstractmethod
    def schema(self, count: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Returns the specs of the tensors that `count` values are encoded to: exact sizes, or upper bounds if a spec
        is not `exact`."""

    def largest_schema(self, count: int, dtype: torch.dtype, tensors: int) -> dict[str, TensorSpec]:  # noqa: ARG002
        """Returns upper bounds of `divided(sizes).schema(k, dtype)` over all k <= count and all divisions into this
        many tensors."""
        return {name: replace(spec, exact=False) for name, spec in self.schema(count, dtype).items()}

    @abc.abstractmethod
    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:
        """Encodes values [K] float, which it leaves unchanged. draws: on the same device; required if `unbiased`."""

    @abc.abstractmethod
    def decode(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        """Decodes to [count] of dtype. Raises PeerFault("malformed_payload") for tensors that `encode` never
        returns."""

    def check(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> None:
        """Raises PeerFault unless the encoded tensors have the sizes that `schema` gives for `count` values."""
        for name, spec in self.schema(count, dtype).items():
            size = coded[name].numel() if name in coded else -1
            if size != spec.max_elements if spec.exact else not 0 <= size <= spec.max_elements:
                raise PeerFault("malformed_payload", f"{name} of {count} values has {size} elements")


@functools.cache
def largest_shared(a: torch.dtype, b: torch.dtype) -> float:
    """Returns the largest number that both floating-point formats can represent: with the shorter mantissa and the
    smaller exponent."""
    ends = [torch.finfo(dtype) for dtype in (a, b)]
    exponent = min(math.frexp(end.max)[1] for end in ends)
    return math.ldexp(1.0 - max(end.eps for end in ends) / 2, exponent)


def cast_clamped(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts values to dtype, and replaces finite values beyond its range by its largest. Does not copy if dtype is
    their own.

    bfloat16 would round the largest values of float16 up to numbers that float16 cannot represent: these become the
    largest number that both can represent, so that converting back gives a finite value. values: small enough for a
    core's cache (a block of `tensors.blocks`), because they are read twice.
    """
    limit = largest_shared(values.dtype, dtype)
    if values.numel() and limit < torch.finfo(values.dtype).max:
        low, high = torch.aminmax(values)
        if not known_all((low >= -limit) & (high <= limit)):  # NaN and infinity are kept
            values = values.clamp(-limit, limit).where(values.isfinite(), values)
    return values.to(dtype)


def make_codec(config: Config) -> Codec:
    """Returns the codec of a configuration section. Raises EnvironmentFault if the codec's library is not installed."""
    made: Codec = load_class(config.name, CODECS, "compression")(config)
    return made
