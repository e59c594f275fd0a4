"""Training for tests that stop sweeps in the middle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from decentnode.config.component import Config
from decentnode.training.base import Direction, Update
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig


class SlowConfig(SupervisedConfig):
    marker: str = ""
    """A file; while it is not there, rounds after the fifth take long."""


class SlowUntilMarkerExists(Supervised):
    Config: ClassVar[type[Config]] = SlowConfig

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if round >= 5 and not Path(self.config.marker).exists():  # type: ignore[attr-defined]
            time.sleep(0.1)
        return super().local_update(round, direction)
