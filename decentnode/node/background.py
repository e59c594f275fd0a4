"""Mixing behind the local steps: what arrives is taken in by a thread of its own, while the training thread trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from decentnode import native
from decentnode.communication.base import Communication
from decentnode.tensors import BLOCK_ELEMENTS

LEAST_ELEMENTS = BLOCK_ELEMENTS
"""Models that are smaller are mixed in less time than a thread takes to start."""


def worthwhile(communication: Communication, model: Tensor) -> bool:
    """Whether to mix behind the local steps where the config does not say: the node has a core to spare, or a payload
    is larger than what its neighbors send before somebody takes it in, so that the rest would fly after the steps."""
    return torch.get_num_threads() > 1 or model.nbytes > communication.ahead_bytes


def supported(communication: Communication, model: Tensor) -> bool:
    """GPUs mix behind the local steps by themselves: what is asked of them waits for nothing."""
    return communication.concurrent and model.device.type == "cpu" and model.numel() >= LEAST_ELEMENTS


class BackgroundMixer:
    """A piece of work under way in a thread of its own, which leaves the other cores to the local steps."""

    def __init__(self, work: Callable[[], None]) -> None:
        """work: bounded by deadlines of its own."""
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mixing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with native.alone():
                self._work()
        except BaseException as error:  # whatever it is, the training thread has to hear of it
            self._error = error

    def join(self) -> None:
        """Blocking until it is done. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
