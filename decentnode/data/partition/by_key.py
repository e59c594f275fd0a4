"""Samples stay with their natural owner (writer, speaker, user): every key goes whole to one node."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import pydantic
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.data.partition.checks import dealt, require_samples
from decentnode.errors import DataError


class ByKeyConfig(Config):
    name: str = "by_key"
    even: Literal["samples", "keys"] = "samples"
    """What nodes get equal amounts of. samples: keys in random order go to the node that has the fewest samples so far.
    keys: all nodes get the same number of keys, up to one (decentralizepy, which gives the remainder to the last
    node)."""
    keys_per_node: int | None = Field(None, ge=1)
    """Number of keys, drawn at random, that each node gets; the samples of all other keys are left out. Default: all
    keys are dealt."""
    order: Literal["random", "ascending"] = "random"
    """Order in which keys are dealt. ascending: with even: keys every node gets a consecutive range of users, as
    decentralizepy deals MovieLens; with keys_per_node the first keys are taken."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> ByKeyConfig:
        if self.order == "ascending" and self.even == "samples" and self.keys_per_node is None:
            raise ValueError("must have even: keys, or keys_per_node, with order: ascending")
        return self


class ByKey(Partition):
    """A node may get several keys, and no key is divided. Covers all samples, or with keys_per_node those of the keys
    that were drawn."""

    Config: ClassVar[type[Config]] = ByKeyConfig

    def __init__(self, config: ByKeyConfig) -> None:
        self.config = config

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        if keys is None:
            raise DataError("partition by_key needs a dataset whose samples have keys; use iid, fractions or "
                            "ordered")  # fmt: skip
        owners, owner_of, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        each = self.config.keys_per_node or 1
        if len(owners) < num_nodes * each:
            needs = "" if each == 1 else f" with partition.keys_per_node = {each}"
            raise DataError(
                f"node {len(owners) // each} would get no training sample: {len(owners)} keys for {num_nodes} "
                f"nodes{needs}; use fewer nodes" + ("" if each == 1 else " or fewer keys for each")
            )
        order = generator.permutation(len(owners)) if self.config.order == "random" else np.arange(len(owners))
        assigned = self._nodes(order, sizes, num_nodes)[owner_of]
        return dealt([np.flatnonzero(assigned == uid) for uid in range(num_nodes)], "use fewer nodes")

    def _nodes(self, order: np.ndarray, sizes: np.ndarray, num_nodes: int) -> np.ndarray:
        """Returns the node of every key, [K]; -1 for keys that are left out."""
        node_of = np.full(len(order), -1, dtype=np.int64)
        if self.config.keys_per_node is not None:
            order = order[: num_nodes * self.config.keys_per_node]
        if self.config.keys_per_node is not None or self.config.even == "keys":
            for uid, mine in enumerate(np.array_split(order, num_nodes)):
                node_of[mine] = uid
            return node_of
        num_samples = np.zeros(num_nodes, dtype=np.int64)
        for owner in order:
            node_of[owner] = num_samples.argmin()
            num_samples[node_of[owner]] += sizes[owner]
        return node_of
