"""Ratings as products of a user's and an item's factors; 206,680 parameters for 610 users and 9,724 films."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from decentnode.config.component import Config
from decentnode.errors import UsageError
from decentnode.models.base import Model, ModelConfig
from decentnode.samples import DataSpec


class MatrixFactorizationConfig(ModelConfig):
    name: str = "matrix_factorization"
    factors: int = Field(20, ge=1)
    """Number of factors of a user, and of an item."""
    spread: float = Field(0.05, gt=0)
    """Initial factors are uniform between minus and plus this value."""


class MatrixFactorization(Model):
    """rating = p_user . q_item (Koren et al. 2009, IEEE Computer 42, without biases, as decentralizepy has it)."""

    Config: ClassVar[type[Config]] = MatrixFactorizationConfig

    def __init__(self, config: MatrixFactorizationConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        if data.users is None or data.items is None or data.input_shape != (2,):
            raise UsageError(f"model matrix_factorization needs pairs of a user and an item, got data for {data.task}")
        return MatrixFactorizationModule(self.config, data.users, data.items)


class MatrixFactorizationModule(nn.Module):
    def __init__(self, config: MatrixFactorizationConfig, users: int, items: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, config.factors)
        self.items = nn.Embedding(items, config.factors)
        for table in (self.users, self.items):
            nn.init.uniform_(table.weight, -config.spread, config.spread)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)
