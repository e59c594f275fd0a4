"""Sets which cuDNN kernels this process uses, through torch's settings for the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from decentnode.config.component import Config


def apply_cudnn_settings(training: Config) -> None:
    """Restricts cuDNN to deterministic kernels from now on, if the section `training` demands it."""
    if getattr(training, "cudnn_deterministic", False):
        torch.backends.cudnn.deterministic = True
        # it selects the kernel that is fastest at the moment, and kernels differ in their bits
        torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def preserve_cudnn_settings() -> Iterator[None]:
    """Restores the previous cuDNN settings at the end of a block."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
