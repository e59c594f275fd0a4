"""A decoder-only transformer like GPT-2 (Radford et al. 2019): predicts the next token at every position."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import Config
from decentnode.errors import UsageError
from decentnode.models.attention import Activation, Attention, AttentionConfig, FeedForward
from decentnode.models.base import Model, vocabulary_of
from decentnode.samples import DataSpec

INIT_STD = 0.02
"""The standard deviation of initial weights."""


class GptConfig(AttentionConfig):
    name: str = "gpt"
    layers: int = Field(4, ge=1)
    """Number of layers; 12 in GPT-2 small, which has 124,439,808 parameters with width 768, 12 heads, 1024 places and
    50257 tokens."""
    activation: Activation = "gelu"
    """Activation function between the linear layers; gelu in GPT-2."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the embeddings, of the attention weights and of the output of each layer."""
    places: int | None = Field(None, ge=1)
    """Number of positions with an embedding; the longest sequence. Default: that of the data."""
    tied: bool = True
    """Whether the last layer shares the weights of the embedding (Press and Wolf 2017, arXiv 1608.05859)."""


class Gpt(Model):
    """Normalization before every attention and every pair of linear layers, and learned embeddings of positions. The
    initial weights of layers that add to the residual stream are divided by the square root of their number. If the
    target is only the token that follows the row, the last position predicts it, and all rows have one length."""

    Config: ClassVar[type[Config]] = GptConfig

    def __init__(self, config: GptConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        vocabulary = vocabulary_of("gpt", data)
        longest, places = data.input_shape[0], self.config.places
        if places is not None and places < longest:
            raise UsageError(f"model gpt has {places} places (model.places), the data has sequences of {longest}")
        return GptModule(self.config, vocabulary, places or longest, last=data.target_shape == ())


class GptModule(nn.Module):
    """Maps tokens [B, T] to a logit per token of the vocabulary: [B, V], or [B, T, V]."""

    def __init__(self, config: GptConfig, vocabulary: int, places: int, last: bool) -> None:
        """last: whether only the last position predicts a token."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.places = nn.Embedding(places, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(GptLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = None if config.tied else nn.Linear(config.width, vocabulary, bias=False)
        self._last = last
        self.apply(_init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "linear.3.weight")):
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.places(places))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x[:, -1] if self._last else x)
        values: Tensor = functional.linear(x, self.embedding.weight) if self.output is None else self.output(x)
        return values


class GptLayer(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, config.heads, config.dropout)
        self.linear = FeedForward(width, config.inner or 4 * width, config.activation, 0.0)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.first_norm(x)
        x = x + self.dropout(self.attention(normal, normal, causal=True))
        added: Tensor = x + self.dropout(self.linear(self.second_norm(x)))
        return added


def _init_weights(part: nn.Module) -> None:
    if isinstance(part, nn.Linear | nn.Embedding):
        nn.init.normal_(part.weight, std=INIT_STD)
    if isinstance(part, nn.Linear) and part.bias is not None:
        nn.init.zeros_(part.bias)
