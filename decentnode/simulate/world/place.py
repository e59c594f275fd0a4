"""Where a simulated process runs, and what it is told of the run as it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decentnode.simulate.world.network import VirtualNetwork
from decentnode.simulate.world.witness import Witness
from decentnode.wire.generation import Limits
from decentnode.wire.messages import Granted


@dataclass(frozen=True)
class Place:
    """Where a simulated process runs."""

    uid: int
    num_nodes: int
    network: VirtualNetwork
    witness: Witness
    digest: str
    """Of config and graph; nodes of another digest are refused."""
    limits: Limits | None
    """Of generations of members; None where there is but one."""
    compute_seconds: Callable[[int], float]
    """How long the local steps of a round take."""
    founders: int | None = None
    """How many of the uids begin the run; all when None."""
    granted: Granted | None = None
    """Of a node that is not in the mapping: what a member told it."""
