"""The LSTM of LEAF for Reddit, as decentralizepy has it; 4,317,895 parameters."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import Config
from decentnode.models.base import Model, ModelConfig, tokens_of
from decentnode.samples import DataSpec


class RedditRnnConfig(ModelConfig):
    name: str = "reddit_rnn"
    embedding: int = Field(200, ge=1)
    """Size of a token's embedding; token 0 is padding, whose embedding is zero."""
    hidden: int = Field(256, ge=1)
    """Width of a layer's state."""
    layers: int = Field(2, ge=1)
    """Number of layers."""


class RedditRnn(Model):
    """Sequences of tokens to the one that follows, from the last state of the last layer. The count of parameters is
    that of 9,999 tokens (Caldas et al. 2018, arXiv 1812.01097)."""

    Config: ClassVar[type[Config]] = RedditRnnConfig

    def __init__(self, config: RedditRnnConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        _, vocabulary = tokens_of("reddit_rnn", data)
        return RedditRnnModule(self.config, vocabulary)


class RedditRnnModule(nn.Module):
    def __init__(self, config: RedditRnnConfig, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.embedding, padding_idx=0)
        self.lstm = nn.LSTM(config.embedding, config.hidden, config.layers, batch_first=True)
        self.inner = nn.Linear(config.hidden, 128)
        self.output = nn.Linear(128, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.embedding(tokens))
        return self.output(functional.relu(self.inner(last[-1])))
