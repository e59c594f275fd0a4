"""The default process group: how many ranks it has, and on which devices its tensors lie."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


def num_ranks() -> int:
    """The number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_device() -> torch.device:
    """The GPU of this rank: that with its local rank's number, or the only one that the process sees.

    Raises ValueError where neither is there.
    """
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count and count != 1:
        raise ValueError(f"local rank {rank} must see one GPU, its own, or more than {rank}, got {count}")
    return torch.device("cuda", 0 if count == 1 else rank)


def device_of_group() -> torch.device:
    """The device of tensors that the default process group can send."""
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def backend_of(device: torch.device) -> str:
    """The name of what sends tensors of a device in the default process group; "" where torch knows of nothing, as for
    groups written in Python."""
    try:
        return str(dist.group.WORLD._get_backend(device).name())  # type: ignore[union-attr]
    except RuntimeError:
        return ""


def check_device(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that the default process group cannot send: one of the CPU where it has NCCL
    alone. name: of the tensor."""
    if dist.is_initialized() and num_ranks() > 1 and dist.get_backend() == "nccl" and not tensor.is_cuda:
        raise ValueError(f"{name} must be on the device that the process group's backend nccl sends from, got "
                         f"{tensor.device}: "
                         f'move the model to {device_of_group()}, or call initialize_dist("gloo")')
