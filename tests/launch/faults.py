"""Training that goes wrong on one node in one round; named in configs as "tests.launch.faults:Raises"."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from decentnode.training.base import Direction, Update
from decentnode.training.supervised import Supervised

UID, ROUND = 2, 3


class Faulty(Supervised):
    def go_wrong(self) -> None:
        raise NotImplementedError

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        if self._uid == UID and round == ROUND:
            self.go_wrong()
        return super().local_update(round, direction)


class Raises(Faulty):
    def go_wrong(self) -> None:
        raise RuntimeError("a bug in my model")


class Dies(Faulty):
    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Faulty):
    def go_wrong(self) -> None:
        time.sleep(600)


class Poisons(Supervised):
    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        update = super().local_update(round, direction)
        if self._uid == UID and round == ROUND:
            self.model.parameters[0] = float("nan")
        return update


class Slow(Supervised):
    """Rounds of 20 ms, so that a test can do something meanwhile."""

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        time.sleep(0.02)
        return super().local_update(round, direction)


def experiment(**sections: Any) -> dict[str, Any]:
    """A small experiment that takes a fraction of a second; `sections` replace its own."""
    return {
        "name": "tiny",
        "graph": {"name": "ring", "nodes": 4},
        "data": {"name": "digits"},
        "model": {"name": "logistic"},
        "training": {"batch_size": 8, "local_steps": 1, "optimizer": {"name": "sgd", "lr": 0.05}},
        "communication": {"name": "zeromq", "timeout_seconds": 20},
        "node": {"rounds": 8, "evaluate_every": 4},
        **sections,
    }
