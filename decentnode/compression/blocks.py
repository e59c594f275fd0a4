"""Codecs that quantize values to a few bits each, with one scale per block of values. No block spans two tensors."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor

from decentnode import tensors
from decentnode.compression import bits
from decentnode.compression.base import Codec, cast_clamped
from decentnode.compression.division import Blocks, Division
from decentnode.config import component
from decentnode.payload import TensorSpec


class BlockConfig(component.Config):
    block: int = Field(1024, ge=8, le=1 << 18)
    """Number of values that share a scale, fewer at the end of a parameter tensor; a power of two."""

    @field_validator("block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value


class Blockwise(Codec):
    """Base of codecs that send a value as an integer of `width` bits relative to the scale of its block.

    Scales: [blocks] float32, one per `block` values, and at most one more for every tensor of a divided vector. A block
    that contains NaN or infinity decodes to NaN. Values are processed in pieces that fit into a core's cache.
    """

    Config: ClassVar[type[component.Config]] = BlockConfig
    metadata: ClassVar[frozenset[str]] = frozenset({"scale"})
    width: int

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.block = config.block
        self._division: Division | None = None
        self._whole_division: Division | None = None
        """The division of the last vector that was not divided into tensors."""

    def divided(self, sizes: Sequence[int]) -> Self:
        other = copy.copy(self)
        other._division = Division.of(sizes, self.block)
        return other

    def _division_of(self, count: int) -> Division:
        if self._division is None:
            if self._whole_division is None or self._whole_division.count != count:
                self._whole_division = Division.of((count,), self.block)
            return self._whole_division
        assert self._division.count == count, f"made for {self._division.count} values, not for {count}"
        return self._division

    def schema(self, count: int, dtype: torch.dtype) -> dict[str, TensorSpec]:  # noqa: ARG002
        return {
            "q": TensorSpec(torch.uint8, bits.packed_bytes(count, self.width)),
            "scale": TensorSpec(torch.float32, self._division_of(count).num_blocks()),
        }

    def largest_schema(self, count: int, dtype: torch.dtype, tensors: int) -> dict[str, TensorSpec]:
        found = super().largest_schema(count, dtype, tensors)
        scales = min(count, found["scale"].max_elements + max(0, tensors - 1))
        return {**found, "scale": replace(found["scale"], max_elements=scales)}

    @abc.abstractmethod
    def scales(self, values: Tensor, blocks: Blocks) -> Tensor:
        """Returns the scales [B] of values [K] float32; not finite for blocks that contain NaN or infinity."""

    @abc.abstractmethod
    def quantize(self, relative: Tensor, draws: torch.Generator | None) -> Tensor:
        """Returns integers [K] in [0, 2^width) for `relative` [K], which are values over their scale and may be
        overwritten."""

    @abc.abstractmethod
    def restore(self, numbers: Tensor) -> Tensor:
        """Returns values relative to the scale, [K] float32, from integers [K]."""

    def encode(self, values: Tensor, draws: torch.Generator | None = None) -> dict[str, Tensor]:
        scales, packed = [], []
        division = self._division_of(values.numel())
        for start, stop in tensors.blocks(0, values.numel(), values.device):
            piece, blocks = cast_clamped(values[start:stop], torch.float32), division.blocks(start, stop)
            scale = self.scales(piece, blocks)
            inverse = scale.reciprocal()
            inverse = inverse.where(inverse.isfinite() & (scale > 0), 0.0)
            relative = blocks.times(piece, inverse)
            if not tensors.known_all(scale.isfinite()):
                relative.nan_to_num_(0.0, 0.0, 0.0)
                scale = scale.where(scale.isfinite(), torch.nan)
            scales.append(scale)
            packed.append(bits.pack_numbers(self.quantize(relative, draws), self.width))
        empty = values.new_empty(0)
        return {
            "q": torch.cat(packed) if packed else empty.to(torch.uint8),
            "scale": torch.cat(scales) if scales else empty.to(torch.float32),
        }

    def decode(self, coded: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        self.check(coded, count, dtype)
        out = torch.empty(count, dtype=dtype, device=coded["q"].device)
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        limit = largest / (1 << self.width)
        division, scales = self._division_of(count), coded["scale"]
        for start, stop in tensors.blocks(0, count, out.device):
            part = coded["q"][start * self.width // 8 : bits.packed_bytes(stop, self.width)]
            relative = self.restore(bits.unpack_numbers(part, self.width, stop - start))
            blocks = division.blocks(start, stop)
            scale, scales = scales[: len(blocks)], scales[len(blocks) :]
            relative = blocks.times(relative, scale)
            if not tensors.known_all(scale.abs() <= limit):  # rounding up can push a block's largest value out of range
                relative.clamp_(-largest, largest)  # keeps NaN
            out[start:stop] = relative
        return out


class IntegerCodec(Blockwise):
    """Base of codecs that send integers from -levels to levels, plus `levels`."""

    levels: int

    def restore(self, numbers: Tensor) -> Tensor:
        return numbers.to(torch.float32).sub_(self.levels)


class RoundedConfig(BlockConfig):
    unbiased: bool = False
    """true: round up or down at random, so that the expectation is the value. false: round to nearest."""


class Int8(IntegerCodec):
    """Integers from -127 to 127; the scale of a block is its largest absolute value over 127."""

    Config: ClassVar[type[component.Config]] = RoundedConfig
    width = 8
    levels = 127

    def __init__(self, config: RoundedConfig) -> None:
        super().__init__(config)
        self.unbiased = config.unbiased

    def scales(self, values: Tensor, blocks: Blocks) -> Tensor:
        return blocks.largest(values.abs()).div_(self.levels)

    def quantize(self, relative: Tensor, draws: torch.Generator | None) -> Tensor:
        relative = _stochastic_round(relative, draws) if self.unbiased else relative.round_()
        return _to_unsigned(relative, self.levels)


class Int4(Int8):
    """Integers from -7 to 7, two per byte; the scale of a block is its largest absolute value over 7."""

    width = 4
    levels = 7


def _to_unsigned(relative: Tensor, levels: int) -> Tensor:
    """Returns relative clamped to [-levels, levels], plus `levels`, as uint8. float32 converts faster to int8
    than to uint8."""
    return relative.clamp_(-levels, levels).to(torch.int8).view(torch.uint8).add_(levels)


def _stochastic_round(relative: Tensor, draws: torch.Generator | None) -> Tensor:
    """Rounds up with the probability of the fractional part, in steps of 2^-16. 64 random bits serve four values. In
    place."""
    words = torch.empty(-(-relative.numel() // 4), dtype=torch.int64, device=relative.device)
    uniform = words.random_(-(2**63), None, generator=draws).view(torch.int16)[: relative.numel()].to(torch.float32)
    return relative.add_(uniform.mul_(2**-16).add_(0.5)).floor_()


class QSGDConfig(BlockConfig):
    levels: int = Field(7, ge=1, le=127)
    """Number of steps from zero to the norm of a block; a value then has one of 2 * levels + 1 forms."""
    block: int = Field(128, ge=8, le=1 << 18)
    """Number of values that share a norm, fewer at the end of a parameter tensor; a power of two. Smaller blocks have
    less noise but send more scales."""


class QSGD(IntegerCodec):
    """norm(v) sign(v_i) l_i / s, with |v_i| s / norm(v) rounded up or down at random to l_i (arXiv 1610.02132, 3.1)."""

    Config: ClassVar[type[component.Config]] = QSGDConfig

    def __init__(self, config: QSGDConfig) -> None:
        super().__init__(config)
        self.levels = config.levels
        self.width = (2 * config.levels).bit_length()
        self.unbiased = True
        self.variance = min(config.block / config.levels**2, config.block**0.5 / config.levels)  # lemma 3.1

    def scales(self, values: Tensor, blocks: Blocks) -> Tensor:
        norms = blocks.sums(values.square()).sqrt_()
        if not tensors.known_all(norms.isfinite()):  # squares beyond float32's range (values of 1e19), NaN or infinity
            exact = blocks.sums(values.double().square_()).sqrt_()
            norms = exact.clamp(max=torch.finfo(torch.float32).max).where(exact.isfinite(), torch.nan).to(torch.float32)
        return norms.div_(self.levels)

    def quantize(self, relative: Tensor, draws: torch.Generator | None) -> Tensor:
        return _to_unsigned(_stochastic_round(relative, draws), self.levels)


class Sign(Blockwise):
    """The sign of each value, one bit, times the mean |v| of its block (arXiv 1802.04434; scaled as in 1901.09847)."""

    width = 1

    def scales(self, values: Tensor, blocks: Blocks) -> Tensor:
        # Divided first by the block size, a power of two, because the sum of a block may exceed float32's range. Means
        # that rounding pushes beyond that range become the largest float32; NaN and infinity are kept.
        means = blocks.sums(values.abs().mul_(1.0 / self.block))
        share = tensors.moved(torch.from_numpy(self.block / blocks.sizes).to(means.dtype), means.device)
        return (means * share).clamp_(max=torch.finfo(torch.float32).max).where(means.isfinite(), torch.nan)

    def quantize(self, relative: Tensor, draws: torch.Generator | None) -> Tensor:  # noqa: ARG002
        return relative >= 0

    def restore(self, numbers: Tensor) -> Tensor:
        return numbers.to(torch.float32).mul_(2.0).sub_(1.0)
