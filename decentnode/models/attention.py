"""Layers of transformers: attention and the two linear layers behind it (Vaswani et al. 2017, arXiv 1706.03762)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import Config
from decentnode.errors import UsageError

Activation = Literal["relu", "gelu"]


def check_heads(config: Config) -> None:
    """Raises ValueError unless the width divides evenly among the heads."""
    width, heads = getattr(config, "width"), getattr(config, "heads")  # noqa: B009
    if width % heads:
        raise ValueError(f"must have a width that is a multiple of heads, got width {width} and heads {heads}")


class Attention(nn.Module):
    """Every place of x [B, T, W] looks at places of a memory [B, S, W], or at those of x itself."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.memory = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        self._heads, self._dropout = heads, dropout

    @property
    def draws(self) -> bool:
        """Whether it draws at random in training."""
        return self._dropout > 0

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """mask: [B, 1, 1, S] bool, the places of the memory that are looked at. causal: place t looks at 0 .. t."""
        return self.look(x, self.keys_and_values(memory), mask=mask, causal=causal)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what is looked at of a memory [B, S, W]: two [B, H, S, W / H]."""
        keys, values = self.memory(memory).chunk(2, -1)
        return self._by_head(keys), self._by_head(values)

    def look(
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
    """x [B, T, W] -> [B, T, W], each place alone, through `inner` units."""

    def __init__(self, width: int, inner: int, activation: Activation, dropout: float) -> None:
        middle = nn.ReLU() if activation == "relu" else nn.GELU(approximate="tanh")
        super().__init__(nn.Linear(width, inner), middle, nn.Dropout(dropout), nn.Linear(inner, width))


def sinusoids(length: int, width: int, device: torch.device, first: int = 0) -> Tensor:
    """Returns the values [length, width] that stand for the places from `first` on (Vaswani et al., section 3.5)."""
    pairs = torch.arange(0, width, 2, device=device)
    angles = torch.arange(first, first + length, device=device)[:, None] * torch.exp(pairs * (-math.log(1e4) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


def sequences_of(model: str, shape: tuple[int, ...], task: str) -> UsageError:
    """Returns the error of data whose samples are no sequences of tokens."""
    return UsageError(f"model {model} needs sequences of tokens, got {task} of samples of shape {list(shape)}")
