"""Equal shares of the shuffled data."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.data.partition.checks import dealt, require_samples


class IidConfig(Config):
    name: str = "iid"


class Iid(Partition):
    """Covers all samples; sizes differ by at most one."""

    Config: ClassVar[type[Config]] = IidConfig

    def __init__(self, config: IidConfig) -> None:
        self.config = config

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        return dealt(np.array_split(generator.permutation(len(targets)), num_nodes), "use fewer nodes")
