"""The contract of a value codec: 1-D float tensors to fewer bytes and back."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from decentnode.component import Component, Config, load_class
from decentnode.compression import CODECS
from decentnode.errors import PeerFault
from decentnode.payload import TensorSpec


class Codec(Component, abc.ABC):
    """A pure function of its configuration: no state between calls. Works on the device of what it is given.

    Empty tensors are fine. NaN and infinity come back as something that is not finite.
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


def make_codec(config: Config) -> Codec:
    """Raises EnvironmentFault when the codec's library is not installed."""
    made: Codec = load_class(config.name, CODECS, "compression")(config)
    return made
