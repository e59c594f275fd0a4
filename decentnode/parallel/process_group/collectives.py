"""Collectives of all ranks: they exchange texts, compute means, and wait for each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.errors import AssemblyError
from decentnode.formatting import names
from decentnode.parallel.process_group.default_group import num_ranks
from decentnode.parallel.process_group.rank_status import allow_store, dead_ranks, first_reported_end
from decentnode.tensors import distinct

MAX_TEXT_BYTES = 1 << 24
MAX_NAME = 100
"""Characters of the longest name of texts; a longer one was sent by something else than `gather_texts`."""

_wait_function: Callable[[Any], None] | None = None


def wait(work: Any) -> None:
    """Waits for a collective (torch's Work; None returns at once). Blocking."""
    if work is not None:
        (_wait_function or (lambda each: each.wait()))(work)


def set_wait_function(how: Callable[[Any], None] | None) -> None:
    """Sets how `wait` waits: with missing="regroup" a wait ends with the generation. None: as torch does."""
    global _wait_function
    _wait_function = how
    allow_store(how is None)


_TORCH_DETAILS = re.compile(r"^\[[^\]]*:\d+\] |\.? ?This is typically caused by.*", re.DOTALL)


def failure_reason(error: BaseException, found: Sequence[int] | None = None) -> str:
    """Returns torch's message for a failed operation, without gloo's source line and its guesses at the cause. Adds
    which rank's script ended first, with its error, if that rank has reported it, or which processes of this host are
    gone without a report. found: those, if `dead_ranks`, which takes its time, was called already."""
    message, ended = _TORCH_DETAILS.sub("", str(error)) or type(error).__name__, first_reported_end()
    if ended is None:
        ranks = dead_ranks() if found is None else found
        who = ("the process of rank {} is gone" if len(ranks) == 1 else "the processes of ranks {} are gone")
        return f"{message}; {who.format(names(ranks))}" if ranks else message
    rank, reason = ended
    return f"{message}; the script of rank {rank} " + (f"ended with an error: {reason}" if reason else "has ended")


def gather_texts(text: str, device: torch.device, what: str, group: Any = None) -> list[str]:
    """Returns [rank] the text of every rank of a group, of all ranks if None. Blocking. Raises ValueError if this
    rank's text is too long, AssemblyError if another rank does something else here. what: the texts' name."""
    own = f"{what}\n{text}".encode(errors="replace")
    if len(own) > MAX_TEXT_BYTES:
        raise ValueError(f"the description of the {what} is too long: {len(own)} bytes")
    size = torch.tensor([len(own)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    wait(dist.all_gather(sizes, size, group=group, async_op=True))
    longest = min(max(int(each) for each in sizes), MAX_TEXT_BYTES)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device) if own else padded[:0]
    texts = [torch.zeros_like(padded) for _ in sizes]
    wait(dist.all_gather(texts, padded, group=group, async_op=True))
    named = [bytes(t[: int(n)].tolist()).decode(errors="replace") for t, n in zip(texts, sizes, strict=True)]
    for rank, each in enumerate(named):
        name = each.partition("\n")[0]
        if name != what:
            does = repr(name) if name.isprintable() and 0 < len(name) < MAX_NAME else "something else"
            raise AssemblyError(f"rank {rank} is at {does}, rank {dist.get_rank(group)} at {what!r}: all ranks must "
                                "make the same objects and call the same functions in one order", [rank])  # fmt: skip
    return [each.partition("\n")[2] for each in named]


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Replaces every tensor by that of rank 0, in place. Blocking."""
    if num_ranks() == 1:  # a single rank may have NCCL and a model on the CPU
        return
    for each in tensors:
        tensor = distinct(each.detach())
        if tensor.numel():
            flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
            wait(dist.broadcast(flat.view(torch.uint8), 0, async_op=True))  # backends support few dtypes
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


def mean_over_ranks(tensor: Tensor, group: Any = None) -> Tensor:
    """Replaces a tensor by its mean over all ranks, or over those of a group. Blocking."""
    count = dist.get_world_size(group)
    if count > 1:
        wait(dist.all_reduce(tensor, group=group, async_op=True))
        tensor.div_(count)
    return tensor
