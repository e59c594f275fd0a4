"""Codecs that convert values to shorter floating-point formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode.compression.base import Codec, cast_clamped
from decentnode.config import component
from decentnode.payload import TensorSpec
from decentnode.tensors import blocks


class CastConfig(component.Config):
    pass


class Float16(Codec):
    """IEEE half precision, 11 significant bits; values beyond 65504 are replaced by 65504."""

    Config: ClassVar[type[component.Config]] = CastConfig
    elementwise: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float16

    def schema(self, count: int, dtype: torch.dtype) -> dict[str, TensorSpec]:  # noqa: ARG002
        return {"q": TensorSpec(self.dtype, count)}

    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        out = torch.empty_like(values, dtype=self.dtype)
        for start, stop in blocks(0, values.numel(), values.device):
            out[start:stop] = cast_clamped(values[start:stop], self.dtype)
        return {"q": out}

    def decode(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        self.check(coded, count, dtype)
        return cast_clamped(coded["q"], dtype)


class BFloat16(Float16):
    """The upper half of float32, 8 significant bits; values that would be rounded to infinity (3.39e38 or more) are
    replaced by the largest finite value."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16


class TruncateConfig(component.Config):
    bits: int = Field(24, ge=10, le=31)
    """Number of bits kept of float32, 9 of which are sign and exponent. A value takes the smallest number of bytes that
    holds them."""


class Truncate(Codec):
    """float32 with a shorter mantissa, rounded to nearest, in two, three or four bytes.

    Values beyond the largest number with this many bits are replaced by that number.
    """

    Config: ClassVar[type[component.Config]] = TruncateConfig

    def __init__(self, config: TruncateConfig) -> None:
        super().__init__(config)
        self.drop = 32 - config.bits
        self.bytes = -(-config.bits // 8)
        self.limit = (2.0 - 2.0 ** (9 - config.bits)) * 2.0**127
        """The largest number with this many bits. Rounding does not change it."""

    def schema(self, count: int, dtype: torch.dtype) -> dict[str, TensorSpec]:  # noqa: ARG002
        return {"q": TensorSpec(torch.uint8, self.bytes * count)}

    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        out = torch.empty(values.numel(), self.bytes, dtype=torch.uint8, device=values.device)
        for start, stop in blocks(0, values.numel(), values.device):
            piece = cast_clamped(values[start:stop], torch.float32)
            raw, near = piece.view(torch.int32), piece.clamp(-self.limit, self.limit).view(torch.int32)
            rounded = near.add_(1 << (self.drop - 1)).where(piece.isfinite(), raw).bitwise_and_(-1 << self.drop)
            out[start:stop] = rounded.view(torch.uint8).view(-1, 4)[:, 4 - self.bytes :]
        return {"q": out.view(-1)}

    def decode(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        self.check(coded, count, dtype)
        planes = coded["q"].view(-1, self.bytes)
        out = torch.empty(count, dtype=dtype, device=planes.device)
        for start, stop in blocks(0, count, planes.device):
            whole = torch.zeros(stop - start, 4, dtype=torch.uint8, device=planes.device)
            whole[:, 4 - self.bytes :] = planes[start:stop]
            out[start:stop] = cast_clamped(whole.view(-1).view(torch.float32), dtype)
        return out
