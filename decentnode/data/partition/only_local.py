"""Every machine deals the whole data to its own nodes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config, load_class, section
from decentnode.data.base import Partition
from decentnode.data.partition import PARTITIONS
from decentnode.errors import DataError

WITHIN = {name: place for name, place in PARTITIONS.items() if name != "only_local"}


class OnlyLocalConfig(Config):
    name: str = "only_local"
    within: Annotated[Config, section(WITHIN, "partition", "iid")] = Field(
        default={"name": "iid"}, validate_default=True
    )
    """How a machine's nodes share the data."""


class OnlyLocal(Partition):
    """Shares are disjoint within a machine, and machines with the same number of nodes divide the data in the same way:
    nodes of one rank on different machines have the same samples (decentralizepy's only_local). For machines that each
    have a copy of the data."""

    Config: ClassVar[type[Config]] = OnlyLocalConfig
    needs_machines = True

    def __init__(self, config: OnlyLocalConfig) -> None:
        self._within: Partition = load_class(config.within.name, WITHIN, "partition")(config.within)
        self._machines: Sequence[Sequence[int]] | None = None
        self.needs_labels = self._within.needs_labels

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        self._machines = machines

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None
    ) -> list[np.ndarray]:
        machines = self._machines if self._machines is not None else [range(num_nodes)]
        if (num_mapped := sum(map(len, machines))) != num_nodes:
            raise DataError(f"partition only_local needs a mapping of {num_nodes} nodes, got one of {num_mapped}")
        parts: dict[int, np.ndarray] = {}
        for uids in machines:
            same = copy.deepcopy(generator)
            parts |= dict(zip(uids, self._within.split(targets, len(uids), same, keys), strict=True))
        return [parts[uid] for uid in range(num_nodes)]
