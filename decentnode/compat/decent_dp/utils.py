"""Decent-DP's module `utils`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from decentnode import parallel

__all__ = ["initialize_dist"]


def initialize_dist(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """decentnode.parallel.initialize_dist, with its arguments; returns (rank, world size). Blocking.

    As in Decent-DP, if CUDA_VISIBLE_DEVICES lists the GPUs of all ranks of the machine, the process sees only its own
    from then on, as cuda:0.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    begun = dist.is_initialized() or torch.cuda.is_initialized()
    if not begun and len(shown) > 1 and len(shown) >= ranks > local:
        os.environ["CUDA_VISIBLE_DEVICES"] = shown[local]
    return parallel.initialize_dist(*args, **kwargs)
