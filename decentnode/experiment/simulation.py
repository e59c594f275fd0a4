"""The `simulate:` section of an experiment: how `decentnode simulate` computes all nodes in one process."""

from __future__ import annotations

from typing import Literal

from decentnode.config.component import Settings
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig


class SimulateConfig(Settings):
    """How a run is simulated. It does not change what a run is: its digest is that of the run with processes."""

    engine: Literal["auto", "stepped", "batched"] = "auto"
    """How the nodes are computed. stepped: each by its own code, in turn, with the bits of a run with processes.
    batched: the models of all nodes in one tensor, local steps and mixing of all at once; equal to stepped up to the
    rounding of floats. auto: a few local steps of each are timed, and the faster one is taken. What batched cannot
    compute is stepped, and the run says why."""
    steps: Literal["auto", "layers", "vmap", "rows"] = "auto"
    """How batched makes the local steps. layers: linear layers as batched matrix products. vmap: the model by
    torch.func.vmap. rows: each node by its own code, as many at a time as there are cores. auto: the fastest in a few
    timed steps; which one that is may differ from machine to machine, and with it the last bits of results."""
    compute: ComputeConfig | None = None
    """How long local work takes on each node, in virtual seconds. With this or `links`, records of rounds and
    evaluations have `virtual_seconds`."""
    links: LinksConfig | None = None
    """What connects the nodes: bandwidths and latencies. Without bounds when not given."""
