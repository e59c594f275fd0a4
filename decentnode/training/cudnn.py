"""Which kernels of cuDNN this process takes: settings of torch for the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from decentnode.config.component import Config


def take_cudnn(training: Config) -> None:
    """Has cuDNN keep to deterministic kernels from now on, if the section `training` asks for that."""
    if getattr(training, "cudnn_deterministic", False):
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False  # what is fastest at the moment, of kernels with other bits


@contextlib.contextmanager
def cudnn_kept() -> Iterator[None]:
    """A block behind which the settings are what they were before."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
