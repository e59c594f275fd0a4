"""Transports that send over each edge by the path that suits it: shared memory, torch.distributed inside a clique, else
ZeroMQ."""

from __future__ import annotations

from typing import ClassVar

from decentnode.communication.hybrid.config import CollectiveConfig, HybridConfig
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.config import component


class Hybrid(ZeroMQ):
    """ZeroMQ and shared memory, one communicator of torch.distributed per clique, and custom paths.

    The model's bits do not depend on the paths: every one delivers the same slices, added in ascending order of uid.
    """

    Config: ClassVar[type[component.Config]] = HybridConfig


class Collective(ZeroMQ):
    """All payloads over torch.distributed: one clique of all nodes. Control, barriers and means stay with ZeroMQ."""

    Config: ClassVar[type[component.Config]] = CollectiveConfig
