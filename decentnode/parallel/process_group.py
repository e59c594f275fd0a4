"""What ranks do over their process group: they tell each other texts, wait, compare, and succeed together or not."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.errors import AssemblyError
from decentnode.parallel.memory import distinct
from decentnode.system import boot_id
from decentnode.words import names

MAX_TEXT_BYTES, MAX_REASON = 1 << 24, 2000


def local_device() -> torch.device:
    """The GPU of this rank: that with its local rank's number, or the only one that the process sees.

    Raises ValueError where neither is there.
    """
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count and count != 1:
        raise ValueError(f"local rank {rank} must see one GPU, its own, or more than {rank}, got {count}")
    return torch.device("cuda", 0 if count == 1 else rank)


TOLD = "LOCAL_WORLD_SIZE"
"""What torchrun says of the number of ranks on a machine."""


def ranks_per_machine(given: int | None = None) -> int:
    """The number of ranks on each machine, as `agreed_per_machine`; 1 where machines have unequally many."""
    return agreed_per_machine(given) or 1


def agreed_per_machine(given: int | None = None) -> int | None:
    """The number of ranks on each machine, the same on all ranks: the given one, or torchrun's, or as counted; None
    where machines have unequally many. Blocking, on all ranks.

    Raises ValueError for what is no number, and AssemblyError naming the ranks where these were given other numbers, or
    where some are told another one than is counted, and the others none: then all ranks raise, and none waits.
    """
    own = f"{given or os.environ.get(TOLD, '')} {int(bool(given))}"
    alone = num_ranks() == 1
    said = [f"{own} ?"] if alone else gather_texts(f"{own} {_host()}", device_of_group(), "name of the host")
    told, explicit, hosts = zip(*(each.split(" ", 2) for each in said), strict=True)
    for rank, each in enumerate(told):
        if each and not (each.isdecimal() and int(each)):
            raise ValueError(f"{TOLD} must be the number of ranks on the machine, got {each!r} on rank {rank}")
    if all(told) and not ("1" in explicit and len({*told}) > 1):
        return int(told[0]) if len({*told}) == 1 else None
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    counted = runs[0] if len({*runs}) == 1 else None
    if {*told} <= {"", str(counted)}:
        return counted
    by_number = {each: [rank for rank, one in enumerate(told) if one == each] for each in dict.fromkeys(told)}
    listed = ", ".join(f"rank {names(ranks)} has {each or 'none'}" for each, ranks in by_number.items())
    found = "machines have unequally many" if counted is None else f"{counted} are counted"
    others = [rank for each, ranks in by_number.items() if each != told[0] for rank in ranks]
    raise AssemblyError(f"local_world_size, or {TOLD} of the environment, must be the same on all ranks or be given "
                        f"on none: {listed}, and {found}", others)  # fmt: skip


def _host() -> str:
    try:
        return boot_id()
    except OSError:
        return socket.gethostname()


_waits: Callable[[Any], None] | None = None


def wait(work: Any) -> None:
    """Blocking: waits for an operation of all ranks (torch's Work; None where there is nothing to wait for)."""
    if work is not None:
        (_waits or (lambda each: each.wait()))(work)


def wait_with(how: Callable[[Any], None] | None) -> None:
    """From now on `wait` waits so: where ranks come and go, a wait ends with their generation. None: as torch does."""
    global _waits
    _waits = how


def gather_texts(text: str, device: torch.device, what: str, group: Any = None) -> list[str]:
    """Blocking: [rank] the text of every rank of a group, of all when None. Raises ValueError if this rank's is too
    long. what: its name."""
    own = text.encode(errors="replace")
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
    return [bytes(t[: int(n)].tolist()).decode(errors="replace") for t, n in zip(texts, sizes, strict=True)]


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """A context that all ranks leave with success, or none. Its body must not wait for other ranks; its end blocks.

    what: the body's purpose, a verb and its object, for messages. Raises what the body raised on this rank; if it
    raised on other ranks alone, AssemblyError naming the first of them and its error. So no rank waits in vain.
    Without a process group this process is the only rank.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    told = "" if failed is None else f"{type(failed).__name__}: {failed}"[:MAX_REASON]
    try:
        said = gather_texts(told, device_of_group(), what) if num_ranks() > 1 else [told]
    except RuntimeError:  # a rank is gone
        if failed is not None:
            raise failed from None
        raise
    if failed is not None:
        raise failed
    for rank, reason in enumerate(said):
        if reason:
            raise AssemblyError(f"rank {rank} could not {what}: {reason}", [rank])


def num_ranks() -> int:
    """The number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


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
        raise ValueError(f"{name} must lie where the process group's backend nccl sends from, got {tensor.device}: "
                         f'move the model to {device_of_group()}, or call initialize_dist("gloo")')


def check_alike(what: str, lines: Iterable[str], device: torch.device) -> None:
    """Blocking. Raises AssemblyError on every rank, naming a rank and its first other line, if lines differ."""
    told = [text.split("\n") for text in gather_texts("\n".join(lines), device, what)]
    for rank, theirs in enumerate(told):
        if theirs == told[0]:
            continue
        for number, line in enumerate(theirs):
            first = told[0][number] if number < len(told[0]) else "nothing"
            if line != first:
                raise AssemblyError(f"rank {rank} has another {what} than rank 0: {line!r}, rank 0 has {first!r}")
        raise AssemblyError(f"rank {rank} has another {what} than rank 0: nothing where it has "
                            f"{told[0][len(theirs)]!r}")  # fmt: skip


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Blocking: replaces every tensor by that of rank 0, in place."""
    if num_ranks() == 1:  # which may have NCCL and a model on the CPU
        return
    for each in tensors:
        tensor = distinct(each.detach())
        if tensor.numel():
            flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
            wait(dist.broadcast(flat.view(torch.uint8), 0, async_op=True))  # backends know few types
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
