"""Joining the process group, and agreeing on what is trained."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.errors import AssemblyError
from decentnode.parallel.shutdown import leave_at_exit

MAX_TEXT_BYTES = 1 << 24


def initialize_dist(backend: str | None = None, timeout_seconds: float = 300.0) -> tuple[int, int]:
    """Join the default process group as torchrun's environment says; (rank, world size). Blocking.

    backend: nccl where CUDA is there and gloo elsewhere, when not given. On GPUs the local rank's device is chosen.
    The process leaves the group by itself before it ends; dist.destroy_process_group() before that is welcome.
    """
    if not dist.is_initialized():
        cuda = torch.cuda.is_available() and backend in (None, "nccl")
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(key, value)
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
        dist.init_process_group(backend or ("nccl" if cuda else "gloo"), timeout=timedelta(seconds=timeout_seconds),
                                device_id=device)  # fmt: skip
        leave_at_exit()
    return dist.get_rank(), dist.get_world_size()


def check_alike(what: str, lines: Iterable[str], device: torch.device) -> None:
    """Blocking: that all ranks have the same lines. Raises AssemblyError, on every rank, naming rank and first line."""
    own = "\n".join(lines).encode()
    if len(own) > MAX_TEXT_BYTES:
        raise ValueError(f"the description of the {what} is too long: {len(own)} bytes")
    world = dist.get_world_size()
    size = torch.tensor([len(own)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(sizes, size)
    longest = min(max(int(each) for each in sizes), MAX_TEXT_BYTES)
    text = torch.zeros(longest, dtype=torch.uint8, device=device)
    text[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device) if own else text[:0]
    texts = [torch.zeros_like(text) for _ in range(world)]
    dist.all_gather(texts, text)
    told = [bytes(t[: int(n)].tolist()).decode(errors="replace").split("\n") for t, n in zip(texts, sizes, strict=True)]
    for rank, theirs in enumerate(told):
        if theirs == told[0]:
            continue
        for number, line in enumerate(theirs):
            first = told[0][number] if number < len(told[0]) else "nothing"
            if line != first:
                raise AssemblyError(f"rank {rank} has another {what} than rank 0: {line!r}, rank 0 has {first!r}")
        raise AssemblyError(f"rank {rank} has another {what} than rank 0: nothing where it has "
                            f"{told[0][len(theirs)]!r}")  # fmt: skip


def broadcast_all(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Blocking: every tensor becomes rank `source`'s."""
    for tensor in tensors:
        if tensor.is_contiguous():
            dist.broadcast(tensor.detach(), source)
        else:
            copy = tensor.detach().contiguous()
            dist.broadcast(copy, source)
            tensor.detach().copy_(copy)
