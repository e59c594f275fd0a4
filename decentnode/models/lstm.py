"""Long short-term memory that predicts the next token at every position of a sequence."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, vocabulary_of
from decentnode.samples import DataSpec


class LstmConfig(ModelConfig):
    name: str = "lstm"
    embedding: int = Field(8, ge=1)
    """Size of a token's embedding."""
    hidden: int = Field(256, ge=1)
    """Units per layer."""
    layers: int = Field(2, ge=1)
    """Number of layers."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout between layers."""


class Lstm(Model):
    """A linear layer maps the state at each position, which depends on the tokens up to it. Rows may be of any length;
    if the target is only the token that follows the row, the last position predicts it."""

    Config: ClassVar[type[Config]] = LstmConfig

    def __init__(self, config: LstmConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        return LstmModule(self.config, vocabulary_of("lstm", data), last=data.target_shape == ())


class LstmModule(nn.Module):
    """Maps tokens [B, T] to a logit per token of the vocabulary: [B, V], or [B, T, V]."""

    def __init__(self, config: LstmConfig, vocabulary: int, last: bool) -> None:
        """last: whether only the last position predicts a token; then all rows have one length."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.embedding)
        self.lstm = nn.LSTM(config.embedding, config.hidden, config.layers, batch_first=True, dropout=config.dropout)
        self.output = nn.Linear(config.hidden, vocabulary)
        self._last = last

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        values: Tensor = self.output(states[:, -1] if self._last else states)
        return values
