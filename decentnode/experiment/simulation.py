"""The `simulate:` section of an experiment: how `decentnode simulate` computes all nodes in one process."""

from __future__ import annotations

from typing import Literal

from decentnode.config.component import Settings


class SimulateConfig(Settings):
    """How a run is simulated. It does not change what a run is: its digest is that of the run with processes."""

    engine: Literal["stepped"] = "stepped"
    """How the nodes are computed. stepped: each by its own code, in turn, with the bits of a run with processes."""
