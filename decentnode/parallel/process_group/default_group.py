"""The default process group: its number of ranks, and the devices of its tensors."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def num_ranks() -> int:
    """Returns the number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_device() -> torch.device:
    """Returns the GPU of this rank: the one with its local rank's number, or the only one that the process sees.

    Raises ValueError if there is neither.
    """
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count and count != 1:
        raise ValueError(f"local rank {rank} must see one GPU, its own, or more than {rank}, got {count}")
    return torch.device("cuda", 0 if count == 1 else rank)


def device_of_group() -> torch.device:
    """Returns the device of tensors that the default process group can send."""
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl_alone() else CPU


def has_nccl_alone() -> bool:
    """Returns whether the default process group sends tensors of GPUs by NCCL and none of the CPU. The name that it was
    given does not tell: torch's `init_process_group()` without a name chooses NCCL on machines with GPUs."""
    return backend_of(CUDA) == "nccl" and not backend_of(CPU)


def backend_of(device: torch.device) -> str:
    """Returns the name of the backend that sends tensors of a device in the default process group; "" if torch does
    not know it, as for groups written in Python."""
    try:
        return str(dist.group.WORLD._get_backend(device).name())  # type: ignore[union-attr]
    except RuntimeError:
        return ""


def check_device(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that the default process group cannot send: one on the CPU if it has NCCL alone.
    name: the tensor's, for messages."""
    if num_ranks() > 1 and not tensor.is_cuda and has_nccl_alone():
        raise ValueError(f"{name} must be on the device that the process group's backend nccl sends from, got "
                         f"{tensor.device}: "
                         f'move the model to {device_of_group()}, or call initialize_dist("gloo")')
