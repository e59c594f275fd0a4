"""What a rank that has run out of inputs does in every step of the others, inside torch's `with Join([...])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from decentnode.parallel.process_group.default_group import device_of_group


class _IdleHook(JoinHook):
    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def main_hook(self) -> None:
        self._step()


class IdleJoinable(Joinable):
    """Base class: takes part in the steps of the other ranks while they have inputs and this rank has none."""

    def _idle_step(self) -> None:
        """Takes a step without inputs. Blocking as a step is."""
        raise NotImplementedError

    def _is_elastic(self) -> bool:
        """Returns whether the membership may change (missing="regroup")."""
        raise NotImplementedError

    def join_hook(self, **_: Any) -> JoinHook:
        if self._is_elastic():
            raise ValueError('with missing="regroup" a rank that has run out of inputs must close its wrapper, or '
                             "end: the others then continue")  # fmt: skip
        return _IdleHook(self._idle_step)

    @property
    def join_device(self) -> torch.device:
        return device_of_group()

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD
