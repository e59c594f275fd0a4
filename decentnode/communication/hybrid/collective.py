"""Every payload over torch.distributed; control, barriers and means stay with ZeroMQ."""

from __future__ import annotations

from typing import ClassVar

from decentnode.communication.hybrid.config import CollectiveConfig
from decentnode.communication.hybrid.transport import Hybrid
from decentnode.communication.routing import Routing
from decentnode.config import component


class Collective(Hybrid):
    """All payloads over torch.distributed: one clique of all nodes."""

    Config: ClassVar[type[component.Config]] = CollectiveConfig

    def _routing_rule(self) -> Routing:
        everybody = tuple(sorted(self._machine_of))
        return Routing(self._machine_of, cliques=(everybody,) if len(everybody) > 1 else ())
