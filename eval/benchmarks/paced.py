"""Training whose rounds take a given time, as on a machine of its own: the benchmarks of virtual time use it."""

from __future__ import annotations

from decentnode import clock
from decentnode.training.base import Direction, Update
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig


class PacedConfig(SupervisedConfig):
    """Keys of `supervised`, and the pace."""

    pace_seconds: float = 0.1
    """Seconds that the local steps of a round take; the rest of them is slept."""
    slow_node: int = -1
    """A node that takes longer; none for -1."""
    slow_factor: float = 1.0
    """By which it takes longer."""


class Paced(Supervised):
    """Supervised learning that sleeps until a round's steps have taken so long."""

    Config = PacedConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        begun, config = clock.now(), self.config
        assert isinstance(config, PacedConfig)
        found = super().local_update(round, direction)
        factor = config.slow_factor if self._uid == config.slow_node else 1.0
        clock.sleep(max(0.0, begun + config.pace_seconds * factor - clock.now()))
        return found
