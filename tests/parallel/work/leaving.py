"""What ranks do in the tests of ranks that cannot start, differ, or leave."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from decentnode.communication.shared_memory.segment import PAGE, Segment
from decentnode.errors import AssemblyError, PeerLost
from decentnode.parallel import DecentralizedDataParallel
from decentnode.parallel.process_group import agreement, rank_status
from decentnode.parallel.process_group.agreement import succeed_on_all_ranks
from decentnode.parallel.transports.presence import WORDS, Presence
from tests.conftest import wait_until
from tests.parallel.work.models import SGD, batch, model


def differing(rank: int, n: int, what: str) -> None:
    module = nn.Linear(4, 5 if rank == 1 and what == "shape" else 3)
    if rank == 1 and what == "frozen":
        module.bias.requires_grad = False
    if rank == 2 and what == "more":
        module.extra = nn.Parameter(torch.zeros(2))
    topology = "ring" if rank == 1 and what == "topology" else "complete"
    options: dict[str, Any] = {"bucket": {"bucket_size_in_mb": 1.5}, "transport": {"transport": "collective"}}
    DecentralizedDataParallel(module, optimizer=SGD, topology=topology, **options.get(what, {}) if rank == 1 else {})


def dies_while_it_wraps(rank: int, n: int, module: str, function: str) -> None:
    """The last rank is gone before the first operation of all ranks that this function makes."""
    if rank == n - 1:
        setattr(importlib.import_module(f"decentnode.parallel.{module}"), function, lambda *_: os._exit(1))
    DecentralizedDataParallel(model(), optimizer=SGD, topology="complete", transport="auto")


def killed_in_an_operation(rank: int, n: int) -> None:
    """The last rank is killed in an operation of all ranks that it has come to, and the first is slow to come."""
    with succeed_on_all_ranks("look for the file"):
        pass
    if rank == n - 1:
        agreement.gather_texts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    elif rank == 0:
        time.sleep(0.5)
    with succeed_on_all_ranks("open the file"):
        pass


def vanish(rank: int, n: int, transport: str, noticed: str) -> None:
    """The last rank stops taking part, until somebody has noticed and makes the file of that name."""
    wrapped = DecentralizedDataParallel(
        model(), optimizer=SGD, topology="exp", timeout_seconds=3, transport=transport,  # type: ignore[arg-type]
    )
    for t in range(3):
        if rank == n - 1 and t == 1:
            wait_until(lambda: os.path.exists(noticed))
            return
        x, y = batch(rank, t)
        try:
            (wrapped(x) - y).square().mean().backward()
        except PeerLost:
            open(noticed, "x").close()
            raise


def out_of_memory(rank: int, n: int, topology: str, where: str) -> None:
    """The last rank's device or host has no memory for its second exchange."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology=topology, transport="collective")

    def fails(*_: Any, **__: Any) -> None:
        if where == "device":
            raise torch.OutOfMemoryError("CUDA out of memory")
        torch.empty(1 << 50)

    for t in range(4):
        if rank == n - 1 and t == 1:
            dist.batch_isend_irecv = dist.all_reduce = fails
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()


def leave(rank: int, n: int, how: str, transport: str, gone: int = 1) -> None:
    """Rank `gone` takes four steps fewer than the others, and then does what `how` says."""
    wrapped = DecentralizedDataParallel(
        model(), optimizer=SGD, topology="ring", timeout_seconds=1000, bucket_size_in_mb=0,
        transport=transport,  # type: ignore[arg-type]
    )
    for t in range(5 if rank == gone else 9):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    if rank != gone or how == "done":  # what is dropped here is closed, and a barrier comes next
        return
    if how == "average":
        wrapped.global_avg()
    if how == "worker left" and os.fork() == 0:  # as a data loader's: it has the rank's shared memory open
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if "decentnode-ddp" not in os.readlink(f"/proc/self/fd/{number}"):
                    os.close(number)
        time.sleep(300)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


class DiskFull(OSError):
    pass


def refuses(rank: int, n: int, what: str) -> tuple[str, float]:
    """Rank 1 cannot do its part of the start. What it comes to, and a sum over all ranks that are asked for next."""

    def no(*_: object, **__: object) -> Any:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    opened = os.open

    def own_only(path: Any, flags: int, *mode: int) -> int:
        return opened(path, flags, *mode) if flags & os.O_CREAT or "decentnode-ddp" not in str(path) else no()

    if rank == 1:
        where: Any = {"mmap": mmap}.get(what.partition(".")[0], os)
        setattr(where, what.partition(".")[2], own_only if what == "os.open" else no)
    module = nn.Sequential() if rank == 1 and what == "model" else model()
    optimizer = no if rank == 1 and what == "optimizer" else SGD
    told = ""
    try:
        DecentralizedDataParallel(module, optimizer=optimizer, topology="ring", transport="shared_memory")
    except (OSError, ValueError, AssemblyError) as error:
        told = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)
    return told, float(total)


def present(rank: int, n: int, how: str, folder: str) -> str:
    """Rank 1 leaves as `how` says, and its process lives on; what rank 0 knows of it."""
    paths = [Path(folder, str(r)) for r in range(n)]
    own = Segment.create(paths[rank], 2 * PAGE, PAGE, watched=True)
    dist.barrier()
    segments = [own if r == rank else Segment.attach(p, 2 * PAGE, PAGE, watched=True) for r, p in enumerate(paths)]
    presence: Presence | None = Presence(segments, [each.words(0, WORDS) for each in segments], rank)
    del own, segments
    assert presence is not None
    presence.at_step(3 + rank)
    dist.barrier()
    if rank == 1 and how == "closed":
        presence.close()
    elif rank == 1 and how == "forgotten":
        presence = None
        gc.collect()
    elif rank == 1 and how == "forgotten by a child" and not (child := os.fork()):
        presence = None
        gc.collect()
        os._exit(0)
    elif rank == 1 and how == "forgotten by a child":
        os.waitpid(child, 0)
    dist.barrier()
    absence = None if presence is None or rank else presence.absent([1])
    dist.barrier()
    return "" if absence is None else absence.reason


def ended_before(rank: int, n: int) -> None:
    """The last rank's process ends before it wraps its model."""
    if rank == n - 1:
        os._exit(1)
    DecentralizedDataParallel(model(), optimizer=SGD)


def report_ends(rank: int, n: int, how: str) -> Any:
    """Both ranks report the end of their scripts, rank 0 first. Returns the first end that each then reads from the
    store; rank 1 with its own number. how: "error": both scripts ended with one; "no error"; "own store": without an
    error, and the store is not that of a torchrun agent."""
    text = "bad\x1b file " + "x" * 1000
    if how != "own store":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for each in range(n):
        if each == rank:
            if how == "error":
                sys.last_value = ValueError(text) if rank == 0 else PeerLost(text)
            rank_status.report_end()
        dist.barrier()
    return rank_status.first_reported_end() if rank == 0 else (rank, rank_status.first_reported_end())


def killed_in_average(rank: int, n: int, transport: Any) -> float | None:
    """The last rank is killed where the others average."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", transport=transport)
    if rank == n - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return wrapped.global_avg(return_d2c=True)


def killed_while_mapping(rank: int, n: int) -> None:
    """The last rank is killed when it has made its segment; raises AssertionError where the others leave its name."""
    made: list[Path] = []
    create = Segment.create

    def watched(path: Path, *more: Any, **keys: Any) -> Segment:
        made.append(path)
        found = create(path, *more, **keys)
        if rank == n - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Segment.create = watched  # type: ignore[method-assign, assignment]
    try:
        DecentralizedDataParallel(model(), optimizer=SGD, topology="complete", transport="shared_memory")
    except (AssemblyError, PeerLost, RuntimeError):
        token = made[0].name.rpartition("-")[0]
        assert not any(made[0].with_name(f"{token}-{each}").exists() for each in range(n)), "a name is left"
    else:
        raise AssertionError("it was made")
