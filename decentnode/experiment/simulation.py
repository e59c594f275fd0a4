"""The `simulate:` section of an experiment: how `decentnode simulate` computes all nodes in one process."""

from __future__ import annotations

from typing import Literal

from decentnode.config.component import Settings
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig


class SimulateConfig(Settings):
    """How a run is simulated. It does not change what a run is: its digest is that of the run with processes."""

    engine: Literal["stepped"] = "stepped"
    """How the nodes are computed. stepped: each by its own code, in turn, with the bits of a run with processes."""
    compute: ComputeConfig | None = None
    """How long local work takes on each node, in virtual seconds. With this or `links`, records of rounds and
    evaluations have `virtual_seconds`."""
    links: LinksConfig | None = None
    """What connects the nodes: bandwidths and latencies. Without bounds when not given."""
