"""Mixes arriving payloads in a background thread while the training thread makes the local steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from decentnode import native
from decentnode.communication.base import Communication
from decentnode.tensors import BLOCK_ELEMENTS

LEAST_ELEMENTS = BLOCK_ELEMENTS
"""The smallest model, in parameters, for which a background thread is used; smaller ones are mixed in less time than it
takes to start a thread."""


def is_worthwhile(communication: Communication, model: Tensor) -> bool:
    """Returns whether to mix in the background if the config does not specify it. It is worthwhile if the node has a
    second core, or if a payload is larger than what neighbors send before the receiver takes chunks from its inbox: the
    rest of such a payload would only arrive after the local steps."""
    return torch.get_num_threads() > 1 or model.nbytes > communication.prefetch_bytes


def is_supported(communication: Communication, model: Tensor) -> bool:
    """Returns whether mixing in the background is possible. A GPU does not need it: its kernels are queued, and the
    training thread does not wait for them."""
    return communication.concurrent and model.device.type == "cpu" and model.numel() >= LEAST_ELEMENTS


class BackgroundMixer:
    """Runs a piece of work in a thread of its own on one core, which leaves the other cores to the local steps."""

    def __init__(self, work: Callable[[], None]) -> None:
        """work: called once in the new thread; it must end by itself within its own deadlines."""
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mixing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with native.alone():
                self._work()
        except BaseException as error:  # `join` raises it in the training thread
            self._error = error

    def join(self) -> None:
        """Wait until the work has ended, and raise what it raised. Blocking."""
        self._thread.join()
        if self._error is not None:
            raise self._error
