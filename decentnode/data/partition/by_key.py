"""Samples stay with their natural owner (writer, speaker, user): every key goes whole to one node."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.data.partition.checks import dealt, require_samples
from decentnode.errors import DataError


class ByKeyConfig(Config):
    name: str = "by_key"


class ByKey(Partition):
    """Covers all samples. Keys in random order go to the node that has the fewest samples so far."""

    Config: ClassVar[type[Config]] = ByKeyConfig

    def __init__(self, config: ByKeyConfig) -> None:
        self.config = config

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        if keys is None:
            raise DataError("partition by_key needs a dataset whose samples have keys; choose another partition")
        owners, owner_of, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        if len(owners) < num_nodes:
            raise DataError(
                f"node {len(owners)} would get no training sample: {len(owners)} keys for {num_nodes} nodes; "
                "use fewer nodes"
            )
        node_of = np.empty(len(owners), dtype=np.int64)
        held = np.zeros(num_nodes, dtype=np.int64)
        for owner in generator.permutation(len(owners)):
            node_of[owner] = held.argmin()
            held[node_of[owner]] += sizes[owner]
        assigned = node_of[owner_of]
        return dealt([np.flatnonzero(assigned == uid) for uid in range(num_nodes)], "use fewer nodes")
