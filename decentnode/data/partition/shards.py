"""Every node gets a few runs of the data sorted by label (McMahan et al. 2017, arXiv 1602.05629, section 3)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.data.partition.checks import dealt, require_samples
from decentnode.errors import DataError


class ShardsConfig(Config):
    name: str = "shards"
    shards: int = Field(2, ge=1)
    """Shards per node; fewer shards give fewer classes per node. Two in McMahan et al."""


class Shards(Partition):
    """Covers all samples (decentralizepy drops the remainder); shard sizes differ by at most one."""

    Config: ClassVar[type[Config]] = ShardsConfig
    needs_labels = True

    def __init__(self, config: ShardsConfig) -> None:
        self.config = config

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        each = self.config.shards
        if len(targets) < num_nodes * each:
            raise DataError(
                f"partition.shards must be at most {len(targets) // num_nodes} for {len(targets)} samples on "
                f"{num_nodes} nodes, got {each}"
            )
        shuffled = generator.permutation(len(targets))
        by_label = shuffled[np.argsort(targets[shuffled], kind="stable")]
        shards = np.array_split(by_label, num_nodes * each)
        order = generator.permutation(num_nodes * each).reshape(num_nodes, each)
        return dealt([np.concatenate([shards[s] for s in mine]) for mine in order], "use fewer nodes")
