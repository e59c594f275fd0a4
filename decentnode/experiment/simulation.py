"""The `simulate:` section of an experiment: how `decentnode simulate` computes all nodes in one process."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from decentnode.config.component import Settings
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig


class SimulatedNewcomerConfig(Settings):
    """A node that is not in the mapping and joins a simulated run, as nodes join a real run by `decentnode join`."""

    at_seconds: float = Field(ge=0)
    """When the node asks to be admitted, in virtual seconds since the start of the run."""
    leaves_at_seconds: float | None = Field(None, gt=0)
    """When the node is asked to leave; it leaves after its current round. Default: it stays to the end."""
    samples_of: int | None = Field(None, ge=0)
    """Node of the mapping on whose samples the newcomer trains; its steps take the median time of the others' steps.
    Default: the newcomer has no samples and only mixes, in no time; if the data is private (a path has ``{uid}``), it
    has the files of its uid."""

    @model_validator(mode="after")
    def _leaves_later(self) -> Self:
        if self.leaves_at_seconds is not None and self.leaves_at_seconds <= self.at_seconds:
            raise ValueError(f"leaves_at_seconds must be more than at_seconds, {self.at_seconds:g}, got "
                             f"{self.leaves_at_seconds:g}")  # fmt: skip
        return self


class SimulateConfig(Settings):
    """How a run is simulated. It does not change what a run is: its digest is that of the run with processes."""

    engine: Literal["auto", "stepped", "batched"] = "auto"
    """How the nodes are computed. stepped: each node by its own code, in turn, with the same bits as a run with
    processes. batched: the models of all nodes in one tensor, local steps and mixing of all nodes at once; equal to
    stepped up to floating-point rounding. auto: a few local steps of each engine are timed, and the faster one is used.
    What batched cannot compute is stepped, and the run says why."""
    steps: Literal["auto", "layers", "vmap", "rows"] = "auto"
    """How batched makes the local steps. layers: linear layers as batched matrix products. vmap: the model by
    torch.func.vmap. rows: each node by its own code, as many at a time as there are cores. auto: the fastest in a few
    timed steps; the choice, and so the last bits of the results, may differ between machines."""
    compute: ComputeConfig | None = None
    """How long local work takes on each node, in virtual seconds. With this or `links`, the records of rounds and
    evaluations have `virtual_seconds`."""
    links: LinksConfig | None = None
    """The connections between nodes: bandwidths and latencies. Default: unlimited."""
    newcomers: tuple[SimulatedNewcomerConfig, ...] = ()
    """Nodes beyond the mapping that join the run (`node.newcomers` says how many may), each with the next free uid."""
