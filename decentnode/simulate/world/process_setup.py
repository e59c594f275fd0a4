"""What a simulated process knows when it starts: its identity, the network, and the run's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decentnode.simulate.world.network import VirtualNetwork
from decentnode.simulate.world.transport_observer import TransportObserver
from decentnode.wire.generation import Limits
from decentnode.wire.messages import Granted


@dataclass(frozen=True)
class ProcessSetup:
    """The environment of a simulated process."""

    uid: int
    num_nodes: int
    network: VirtualNetwork
    observer: TransportObserver
    digest: str
    """Digest of config and graph; nodes with a different one are refused."""
    limits: Limits | None
    """Limits of the membership protocol; None if the membership never changes."""
    compute_seconds: Callable[[int], float]
    """Returns the duration of the local steps of a round."""
    founders: int | None = None
    """Number of uids that begin the run; None: all."""
    granted: Granted | None = None
    """For a node that is not in the mapping: the answer with which a member admitted it."""
