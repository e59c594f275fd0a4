"""Values in shorter floating-point formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode import component
from decentnode.compression.base import Codec
from decentnode.payload import TensorSpec
from decentnode.tensors import blocks


class CastConfig(component.Config):
    pass


class Float16(Codec):
    """IEEE half precision: 11 significant bits; values beyond 65504 become the largest there is."""

    Config: ClassVar[type[component.Config]] = CastConfig
    elementwise: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float16

    def schema(self, count: int, dtype: torch.dtype) -> dict[str, TensorSpec]:  # noqa: ARG002
        return {"q": TensorSpec(self.dtype, count)}

    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        out, limit = torch.empty_like(values, dtype=self.dtype), torch.finfo(self.dtype).max
        for start, stop in blocks(0, values.numel()):
            piece = values[start:stop]
            low, high = torch.aminmax(piece)
            if not -limit <= float(low) <= float(high) <= limit:  # NaN and infinity stay what they are
                piece = piece.clamp(-limit, limit).where(piece.isfinite(), piece)
            out[start:stop] = piece
        return {"q": out}

    def decode(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        self.check(coded, count, dtype)
        return coded["q"].to(dtype)


class BFloat16(Float16):
    """The upper half of float32: 8 significant bits over the whole range."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        return {"q": values.to(self.dtype)}


class TruncateConfig(component.Config):
    bits: int = Field(24, ge=10, le=31)
    """Bits kept of float32, sign and exponent (9) included; whole bytes that are empty then do not travel."""


class Truncate(Codec):
    """float32 with fewer bits behind the point, rounded to nearest; in two, three or four bytes."""

    Config: ClassVar[type[component.Config]] = TruncateConfig

    def __init__(self, config: component.Config) -> None:
        super().__init__(config)
        assert isinstance(config, TruncateConfig)
        self.drop = 32 - config.bits
        self.bytes = -(-config.bits // 8)

    def schema(self, count: int, dtype: torch.dtype) -> dict[str, TensorSpec]:  # noqa: ARG002
        return {"q": TensorSpec(torch.uint8, self.bytes * count)}

    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        out = torch.empty(values.numel(), self.bytes, dtype=torch.uint8, device=values.device)
        for start, stop in blocks(0, values.numel()):
            piece = values[start:stop].to(torch.float32)
            raw = piece.view(torch.int32)
            rounded = (raw + (1 << (self.drop - 1))).where(piece.isfinite(), raw).bitwise_and_(-1 << self.drop)
            out[start:stop] = rounded.view(torch.uint8).view(-1, 4)[:, 4 - self.bytes :]
        return {"q": out.view(-1)}

    def decode(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        self.check(coded, count, dtype)
        planes = coded["q"].view(-1, self.bytes)
        out = torch.empty(count, dtype=dtype, device=planes.device)
        for start, stop in blocks(0, count):
            whole = torch.zeros(stop - start, 4, dtype=torch.uint8, device=planes.device)
            whole[:, 4 - self.bytes :] = planes[start:stop]
            out[start:stop] = whole.view(-1).view(torch.float32)
        return out
