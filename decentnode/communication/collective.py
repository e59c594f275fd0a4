"""Every payload over torch.distributed; control, barriers and means stay with ZeroMQ."""

from __future__ import annotations

from typing import ClassVar

from decentnode import component
from decentnode.communication.edges import EdgeRule
from decentnode.communication.hybrid import Hybrid
from decentnode.communication.hybrid_config import CollectiveConfig


class Collective(Hybrid):
    """All payloads over torch.distributed: one clique of all nodes."""

    Config: ClassVar[type[component.Config]] = CollectiveConfig

    def _edge_rule(self) -> EdgeRule:
        everybody = tuple(sorted(self._machine_of))
        return EdgeRule(self._machine_of, cliques=(everybody,) if len(everybody) > 1 else ())
