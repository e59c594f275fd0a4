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
    """Dropout of the embeddings, of the attention weights, inside the linear layers and of the output of each part of a
    layer."""
    norm: Literal["before", "after"] = "before"
    """Where a part of a layer is normalized. before: its input; trains without a warm-up of the learning rate (Xiong et
    al. 2020, arXiv 2002.04745). after: the sum of its input and output, as in the paper."""
    tied: bool = True
    """Whether source, target and the last layer share the weights of one embedding (section 3.4); otherwise there are
    three."""


class Transformer(Model):
    """Pairs of sequences, such as those of `parallel_text`; positions are encoded by sines and cosines."""

    Config: ClassVar[type[Config]] = TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        if not data.pairs or data.vocabulary is None or data.padding is None:
            raise UsageError("model transformer needs pairs of sequences of tokens, such as of data parallel_text, got "
                             f"{data.task} of samples of shape {list(data.input_shape)}")  # fmt: skip
        return TransformerModule(self.config, data.vocabulary, data.padding)


class TransformerModule(nn.Module):
    """Maps pairs [B, T, 2], the tokens of the source and of the target so far, to logits of the target's next tokens,
    [B, T, V]."""

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
        """Returns the memory [B, S, W] of source tokens [B, S], and a mask [B, 1, 1, S] that is False at padding."""
        mask = (source != self._padding)[:, None, None]
        x = self._embed(self.embedding, source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def translate(self, source: Tensor, most: int) -> Tensor:
        """Decodes source tokens [B, S] greedily, always taking the likeliest next token.

        Returns [B, at most `most`]; tokens after the END of a translation are arbitrary.
        """
        memory, mask = self.encode(source)
        layers = cast("list[DecoderLayer]", list(self.decoder))
        states = [DecoderState(layer.attended.keys_and_values(memory)) for layer in layers]
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


class DecoderState:
    """The keys and values that a decoder layer attends to when it decodes one position at a time."""

    def __init__(self, memory: tuple[Tensor, Tensor]) -> None:
        """memory: keys and values of the encoder's output."""
        self.memory = memory
        self._before: tuple[Tensor, Tensor] | None = None

    def append(self, attention: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
        """Appends x [B, 1, W], and returns keys and values of all target positions so far."""
        new = attention.keys_and_values(x)
        if self._before is not None:
            new = torch.cat([self._before[0], new[0]], 2), torch.cat([self._before[1], new[1]], 2)
        self._before = new
        return new


class Layer(nn.Module):
    """An encoder layer: self-attention and two linear layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self._before = config.norm == "before"
        self.norm, self.linear_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, config.heads, config.dropout)
        self.linear = FeedForward(width, config.inner or 4 * width, config.activation, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """mask: [B, 1, 1, S] bool, the positions of x to attend to."""
        normal = self._norm_input(self.norm, x)
        x = self._add_residual(self.norm, x, self.attention(normal, normal, mask=mask))
        return self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._add_residual(self.linear_norm, x, self.linear(self._norm_input(self.linear_norm, x)))

    def _norm_input(self, norm: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = norm(x) if self._before else x
        return found

    def _add_residual(self, norm: nn.Module, x: Tensor, added: Tensor) -> Tensor:
        x = x + self.dropout(added)
        found: Tensor = x if self._before else norm(x)
        return found


class DecoderLayer(Layer):
    """A decoder layer: causal self-attention, attention to the encoder's memory, and two linear layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attended = Attention(config.width, config.heads, config.dropout)
        self.attended_norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """mask: the positions of the memory to attend to."""
        assert memory is not None
        normal = self._norm_input(self.norm, x)
        x = self._add_residual(self.norm, x, self.attention(normal, normal, causal=True))
        return self._attend_and_feed(x, self.attended.keys_and_values(memory), mask)

    def next(self, x: Tensor, state: DecoderState, mask: Tensor) -> Tensor:
        """Computes `forward` for one more position, x [B, 1, W]."""
        normal = self._norm_input(self.norm, x)
        x = self._add_residual(self.norm, x, self.attention.attend(normal, state.append(self.attention, normal)))
        return self._attend_and_feed(x, state.memory, mask)

    def _attend_and_feed(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        attended_values = self.attended.attend(self._norm_input(self.attended_norm, x), memory, mask=mask)
        return self._feed_forward(self._add_residual(self.attended_norm, x, attended_values))
