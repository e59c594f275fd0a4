"""The transformer for translation (Vaswani et al. 2017, arXiv 1706.03762): an encoder, and a decoder that attends to
it."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import Config
from decentnode.errors import UsageError
from decentnode.models.attention import Activation, Attention, AttentionConfig, FeedForward, sinusoids
from decentnode.models.base import Model
from decentnode.samples import BEGIN, END, DataSpec


class TransformerConfig(AttentionConfig):
    name: str = "transformer"
    layers: int = Field(3, ge=1)
    """Number of layers of the encoder, and of the decoder; 6 in the paper's base model, which has width 512, 8 heads,
    2048 inner units, dropout 0.1 and norm: after."""
    activation: Activation = "relu"
    """Activation function between the linear layers."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Of the embeddings, of what attention looks at and of the sums behind each part of a layer."""
    norm: Literal["before", "after"] = "before"
    """Where a part of a layer is normalized. before: its input; trains without a warm-up of the learning rate (Xiong et
    al. 2020, arXiv 2002.04745). after: the sum of its input and output, as in the paper."""
    tied: bool = True
    """Whether source, target and the last layer share the weights of one embedding (section 3.4); otherwise there are
    three."""


class Transformer(Model):
    """Pairs of sequences, such as of `parallel_text`; places are told by sines and cosines."""

    Config: ClassVar[type[Config]] = TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        if not data.pairs or data.vocabulary is None or data.padding is None:
            raise UsageError("model transformer needs pairs of sequences of tokens, such as of data parallel_text, got "
                             f"{data.task} of samples of shape {list(data.input_shape)}")  # fmt: skip
        return TransformerModule(self.config, data.vocabulary, data.padding)


class TransformerModule(nn.Module):
    """Maps pairs [B, T, 2], tokens of the source and of the target so far, to a value per token of the vocabulary for
    what the target has next: [B, T, V]."""

    def __init__(self, config: TransformerConfig, vocabulary: int, padding: int) -> None:
        super().__init__()
        width = config.width
        self._padding, self._width = padding, width
        self.embedding = nn.Embedding(vocabulary, width)
        self.target_embedding = None if config.tied else nn.Embedding(vocabulary, width)
        self.output = None if config.tied else nn.Linear(width, vocabulary, bias=False)
        self.encoder = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        before = config.norm == "before"
        self.encoder_norm = nn.LayerNorm(width) if before else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if before else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=width**-0.5)

    def forward(self, pairs: Tensor) -> Tensor:
        source, target = pairs.unbind(-1)
        memory, mask = self.encode(source)
        x = self._embed(self.target_embedding or self.embedding, target)
        for layer in self.decoder:
            x = layer(x, mask, memory)
        return self._values(x)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the memory [B, S, W] of source tokens [B, S], and which places of it are no padding [B, 1, 1, S]."""
        mask = (source != self._padding)[:, None, None]
        x = self._embed(self.embedding, source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def translate(self, source: Tensor, most: int) -> Tensor:
        """Returns for source tokens [B, S] the likeliest token, one after the other: [B, at most `most`], END and
        anything behind it where a translation has ended."""
        memory, mask = self.encode(source)
        layers = cast("list[DecoderLayer]", list(self.decoder))
        states = [State(layer.attended.keys_and_values(memory)) for layer in layers]
        token = torch.full_like(source[:, 0], BEGIN)
        ended = torch.zeros_like(token, dtype=torch.bool)
        found = []
        for place in range(most):
            x = self._embed(self.target_embedding or self.embedding, token[:, None], place)
            for layer, state in zip(layers, states, strict=True):
                x = layer.next(x, state, mask)
            token = self._values(x)[:, 0].argmax(1)
            found.append(token)
            ended |= token == END
            if ended.all():
                break
        return torch.stack(found, 1)

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, first: int = 0) -> Tensor:
        places = sinusoids(tokens.shape[1], self._width, tokens.device, first)
        found: Tensor = self.dropout(embedding(tokens) * math.sqrt(self._width) + places)
        return found

    def _values(self, x: Tensor) -> Tensor:
        x = self.decoder_norm(x)
        values: Tensor = functional.linear(x, self.embedding.weight) if self.output is None else self.output(x)
        return values


class State:
    """What a layer of the decoder looks at when it is asked place by place."""

    def __init__(self, memory: tuple[Tensor, Tensor]) -> None:
        """memory: keys and values of the encoder's."""
        self.memory = memory
        self._before: tuple[Tensor, Tensor] | None = None

    def with_place(self, attention: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the target's places up to x [B, 1, W]."""
        new = attention.keys_and_values(x)
        if self._before is not None:
            new = torch.cat([self._before[0], new[0]], 2), torch.cat([self._before[1], new[1]], 2)
        self._before = new
        return new


class Layer(nn.Module):
    """A part of the encoder: attention to the same sequence, and two linear layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self._before = config.norm == "before"
        self.norm, self.linear_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, config.heads, config.dropout)
        self.linear = FeedForward(width, config.inner or 4 * width, config.activation, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """mask: the places [B, 1, 1, S] of x that are looked at."""
        normal = self._entering(self.norm, x)
        x = self._leaving(self.norm, x, self.attention(normal, normal, mask=mask))
        return self._through_linear(x)

    def _through_linear(self, x: Tensor) -> Tensor:
        return self._leaving(self.linear_norm, x, self.linear(self._entering(self.linear_norm, x)))

    def _entering(self, norm: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = norm(x) if self._before else x
        return found

    def _leaving(self, norm: nn.Module, x: Tensor, added: Tensor) -> Tensor:
        x = x + self.dropout(added)
        found: Tensor = x if self._before else norm(x)
        return found


class DecoderLayer(Layer):
    """Also attention to the encoder's memory, between the two; in the sequence it looks at what stands before."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attended = Attention(config.width, config.heads, config.dropout)
        self.attended_norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """mask: of the memory."""
        assert memory is not None
        normal = self._entering(self.norm, x)
        x = self._leaving(self.norm, x, self.attention(normal, normal, causal=True))
        return self._through_rest(x, self.attended.keys_and_values(memory), mask)

    def next(self, x: Tensor, state: State, mask: Tensor) -> Tensor:
        """As `forward`, of one more place [B, 1, W]."""
        normal = self._entering(self.norm, x)
        x = self._leaving(self.norm, x, self.attention.look(normal, state.with_place(self.attention, normal)))
        return self._through_rest(x, state.memory, mask)

    def _through_rest(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        looked = self.attended.look(self._entering(self.attended_norm, x), memory, mask=mask)
        return self._through_linear(self._leaving(self.attended_norm, x, looked))
