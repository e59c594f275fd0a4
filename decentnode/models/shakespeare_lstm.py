"""The LSTM of LEAF for Shakespeare, as decentralizepy has it; 2,683,708 parameters."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, tokens_of
from decentnode.samples import DataSpec


class ShakespeareLstmConfig(ModelConfig):
    name: str = "shakespeare_lstm"
    embedding: int = Field(8, ge=1)
    """Size of a token's embedding."""
    hidden: int = Field(256, ge=1)
    """Width of a layer's state."""
    layers: int = Field(2, ge=1)
    """Number of layers."""


class ShakespeareLstm(Model):
    """Sequences of one length to the token that follows; the linear layer sees all states of the last layer. The count
    of parameters is that of 80 characters out of 92 (Caldas et al. 2018, arXiv 1812.01097)."""

    Config: ClassVar[type[Config]] = ShakespeareLstmConfig

    def __init__(self, config: ShakespeareLstmConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        length, vocabulary = tokens_of("shakespeare_lstm", data)
        return ShakespeareLstmModule(self.config, length, vocabulary)


class ShakespeareLstmModule(nn.Module):
    def __init__(self, config: ShakespeareLstmConfig, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.embedding)
        self.lstm = nn.LSTM(config.embedding, config.hidden, config.layers, batch_first=True)
        self.output = nn.Linear(config.hidden * length, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.output(functional.relu(states.flatten(1)))
