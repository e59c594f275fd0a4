"""Top-k in a wavelet basis."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decentnode.compression.wavelets import DWT, WAVELETS
from decentnode.config import component
from decentnode.payload import TensorSpec
from decentnode.sharing.topk import TopK, TopKConfig


class WaveletConfig(TopKConfig):
    wavelet: Literal[tuple(WAVELETS)] = "sym2"  # type: ignore[valid-type]
    """Orthogonal wavelet of the transform."""
    level: int = Field(4, ge=1, le=16)
    """Levels of the transform: how often its low-pass half is split again."""


class Wavelet(TopK):
    """Top-k of the model's wavelet coefficients (Wavelet of decentralizepy), averaged there and transformed back."""

    Config: ClassVar[type[component.Config]] = WaveletConfig

    def __init__(self, config: WaveletConfig) -> None:
        super().__init__(config)
        self._dwt = DWT(config.wavelet, config.level)

    def transform(self, model: Tensor) -> Tensor:
        return self._dwt.forward(model)

    def restore(self, coefficients: Tensor, model: Tensor) -> None:
        model.copy_(self._dwt.inverse(coefficients, model.numel()))

    def coefficients(self, elements: int) -> int:
        return self._dwt.coefficients(elements)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return super().payload_schema(elements, torch.float64 if dtype == torch.float64 else torch.float32)
