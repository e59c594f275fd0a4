"""A training whose rounds take a given time, as if each node had a machine of its own; for benchmarks of virtual
time."""

from __future__ import annotations

from decentnode import clock
from decentnode.training.base import Direction, Update
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig


class PacedConfig(SupervisedConfig):
    """Keys of `supervised`, and the pace."""

    pace_seconds: float = 0.1
    """Seconds that the local steps of a round take, filled up by sleeping."""
    slow_node: int = -1
    """The node that takes longer; -1 for none."""
    slow_factor: float = 1.0
    """How many times longer it takes."""


class Paced(Supervised):
    """Supervised learning that sleeps until a round's steps have taken the given time."""

    Config = PacedConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        begun, config = clock.now(), self.config
        assert isinstance(config, PacedConfig)
        found = super().local_update(round, direction)
        factor = config.slow_factor if self._uid == config.slow_node else 1.0
        clock.sleep(max(0.0, begun + config.pace_seconds * factor - clock.now()))
        return found
