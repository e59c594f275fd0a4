"""Mixing in the background: a thread of its own mixes what arrives, while the training thread makes the local steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from decentnode import native
from decentnode.communication.base import Communication
from decentnode.tensors import BLOCK_ELEMENTS

LEAST_ELEMENTS = BLOCK_ELEMENTS
"""Smaller models are mixed in less time than a thread takes to start."""


def worthwhile(communication: Communication, model: Tensor) -> bool:
    """Returns whether to mix in the background where the config does not say. It is worthwhile where the node has a
    second core, or where a payload is larger than neighbors send before the receiver takes chunks from its inbox: the
    rest of it would arrive only after the local steps."""
    return torch.get_num_threads() > 1 or model.nbytes > communication.ahead_bytes


def supported(communication: Communication, model: Tensor) -> bool:
    """Returns whether mixing in the background is possible. A GPU does not need it: its kernels are queued, and the
    training thread does not wait for them."""
    return communication.concurrent and model.device.type == "cpu" and model.numel() >= LEAST_ELEMENTS


class BackgroundMixer:
    """Runs a piece of work in a thread of its own, on one core, so that the others are left to the local steps."""

    def __init__(self, work: Callable[[], None]) -> None:
        """work: has deadlines of its own."""
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
        """Wait for the end of the work. Raises what it raised. Blocking."""
        self._thread.join()
        if self._error is not None:
            raise self._error
