"""Every node holds samples of only k classes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.data.partition.checks import dealt, require_samples
from decentnode.errors import DataError


class KClassesConfig(Config):
    name: str = "k_classes"
    classes: int = Field(2, ge=1)
    """Number of classes that a node has samples of; at most those of the data."""


class KClasses(Partition):
    """A class is held by as many nodes as any other (one more or less) and its samples are dealt evenly to them.

    Covers all samples when num_nodes * classes is at least the number of classes; classes without a holder are
    left out otherwise.
    """

    Config: ClassVar[type[Config]] = KClassesConfig
    needs_labels = True

    def __init__(self, config: KClassesConfig) -> None:
        self.config = config

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        present = np.unique(targets)
        each = self.config.classes
        if each > len(present):
            raise DataError(
                f"partition.classes must be at most {len(present)}, the number of classes in the data, got {each}"
            )
        holders: list[list[int]] = [[] for _ in present]
        num_holders = np.zeros(len(present), dtype=np.int64)
        for uid in range(num_nodes):
            # The classes with the fewest holders first, ties at random: balanced, and a node's classes are distinct.
            for c in np.lexsort((generator.random(len(present)), num_holders))[:each]:
                holders[c].append(uid)
                num_holders[c] += 1
        parts: list[list[np.ndarray]] = [[] for _ in range(num_nodes)]
        for c, label in enumerate(present):
            if holders[c]:
                mine = generator.permutation(np.flatnonzero(targets == label))
                for uid, part in zip(holders[c], np.array_split(mine, len(holders[c])), strict=True):
                    parts[uid].append(part)
        remedy = "its classes have too few samples: raise partition.classes or use fewer nodes"
        return dealt([np.concatenate(part) for part in parts], remedy)
