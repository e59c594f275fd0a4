"""The `simulate:` section of an experiment: how `decentnode simulate` computes all nodes in one process."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from decentnode.config.component import Settings
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig


class ComingConfig(Settings):
    """A node that is in no mapping and comes to a simulated run, as with `decentnode join` to one on machines."""

    at_seconds: float = Field(ge=0)
    """When it asks to be admitted, in virtual seconds since the start of the run."""
    leaves_at_seconds: float | None = Field(None, gt=0)
    """When it is asked to leave; it does so after its round. Default: it stays to the end."""
    samples_of: int | None = Field(None, ge=0)
    """The node of the mapping whose samples it trains on, and as long as others do. Default: it has none and only
    mixes, in no time; where data is private (a path has ``{uid}``) it has the files of its uid."""

    @model_validator(mode="after")
    def _leaves_later(self) -> Self:
        if self.leaves_at_seconds is not None and self.leaves_at_seconds <= self.at_seconds:
            raise ValueError(f"leaves_at_seconds must be more than at_seconds, {self.at_seconds:g}, got "
                             f"{self.leaves_at_seconds:g}")  # fmt: skip
        return self


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
    newcomers: tuple[ComingConfig, ...] = ()
    """Nodes beyond the mapping that come (`node.newcomers` says how many may), each with the next free uid."""
