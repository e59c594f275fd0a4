"""Layers of transformers: attention, and the two linear layers after it (Vaswani et al. 2017, arXiv 1706.03762)."""

from __future__ import annotations

import math
from typing import Literal

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from decentnode.models.base import ModelConfig

Activation = Literal["relu", "gelu"]


class AttentionConfig(ModelConfig):
    """Base of the Configs of models with attention."""

    width: int = Field(128, ge=1)
    """Size of a token's embedding; a multiple of `heads`."""
    heads: int = Field(4, ge=1)
    """Number of attention heads in a layer."""
    inner: int | None = Field(None, ge=1)
    """Units between the two linear layers after an attention. Default: four times the width."""

    @pydantic.model_validator(mode="after")
    def _divides(self) -> AttentionConfig:
        if self.width % self.heads:
            raise ValueError(
                f"must have a width that is a multiple of heads, got width {self.width} and heads {self.heads}"
            )
        return self


class Attention(nn.Module):
    """Multi-head attention of every position of x [B, T, W] to positions of a memory [B, S, W], which may be x."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.memory = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        self._heads, self._dropout = heads, dropout

    @property
    def draws(self) -> bool:
        """Whether it uses random numbers in training (dropout)."""
        return self._dropout > 0

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """mask: [B, 1, 1, S] bool, the positions of the memory to attend to. causal: position t attends to 0 .. t."""
        return self.attend(x, self.keys_and_values(memory), mask=mask, causal=causal)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a memory [B, S, W]: two [B, H, S, W / H]."""
        keys, values = self.memory(memory).chunk(2, -1)
        return self._by_head(keys), self._by_head(values)

    def attend(
        self, x: Tensor, at: tuple[Tensor, Tensor], *, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        found = functional.scaled_dot_product_attention(
            self._by_head(self.query(x)), *at, attn_mask=mask, is_causal=causal,
            dropout_p=self._dropout if self.training else 0.0)  # fmt: skip
        joined: Tensor = self.output(found.transpose(1, 2).flatten(2))
        return joined

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self._heads, -1)).transpose(1, 2)


class FeedForward(nn.Sequential):
    """Maps x [B, T, W] -> [B, T, W], each position by itself, through `inner` units."""

    def __init__(self, width: int, inner: int, activation: Activation, dropout: float) -> None:
        middle = nn.ReLU() if activation == "relu" else nn.GELU(approximate="tanh")
        super().__init__(nn.Linear(width, inner), middle, nn.Dropout(dropout), nn.Linear(inner, width))


def sinusoids(length: int, width: int, device: torch.device, first: int = 0) -> Tensor:
    """Returns the encodings [length, width] of positions from `first` on (Vaswani et al., section 3.5)."""
    pairs = torch.arange(0, width, 2, device=device)
    angles = torch.arange(first, first + length, device=device)[:, None] * torch.exp(pairs * (-math.log(1e4) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
