"""Shares of stated sizes, of the shuffled data or in its own order."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.data.partition.checks import dealt, require_samples
from decentnode.errors import DataError

Fraction = Annotated[float, Field(gt=0, le=1)]


class FractionsConfig(Config):
    name: str = "fractions"
    fractions: tuple[Fraction, ...] | None = None
    """Fraction of all samples that each node gets, in the order of the uids. Default: equal parts. If they add up to
    less than 1, the rest is left out (decentralizepy's sizes)."""


class Fractions(Partition):
    """Shuffles the samples and cuts them into consecutive parts. Covers all samples if the fractions add up to 1."""

    Config: ClassVar[type[Config]] = FractionsConfig

    def __init__(self, config: FractionsConfig) -> None:
        self.config = config

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        return self._cut(generator.permutation(len(targets)), num_nodes)

    def _cut(self, order: np.ndarray, num_nodes: int) -> list[np.ndarray]:
        """Returns consecutive parts of `order`."""
        fractions = self.config.fractions
        if fractions is None:
            return dealt(np.array_split(order, num_nodes), "use fewer nodes")
        if len(fractions) != num_nodes:
            raise DataError(f"partition.fractions must name {num_nodes} fractions, one per node, got {len(fractions)}")
        ends = np.cumsum(fractions)
        if ends[-1] > 1 + 1e-6:
            raise DataError(f"partition.fractions must add up to at most 1, got {ends[-1]:g}")
        # The ends are rounded, not the sizes, so that parts that add up to 1 leave no sample out.
        stops = np.minimum(np.round(ends * len(order)).astype(np.int64), len(order))
        parts = np.split(order[: stops[-1]], stops[:-1])
        return dealt(parts, "its fraction is too small: raise it in partition.fractions")


class OrderedConfig(FractionsConfig):
    name: str = "ordered"


class Ordered(Fractions):
    """Cuts the samples into consecutive parts in the order of the files, if that order means something: time, or
    labels. Covers all samples if the fractions add up to 1."""

    Config: ClassVar[type[Config]] = OrderedConfig

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        return self._cut(np.arange(len(targets)), num_nodes)
