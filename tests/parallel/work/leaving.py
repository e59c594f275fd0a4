"""Functions of ranks for the tests of ranks that cannot start, differ from the others, or leave."""

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


def wrap_with_difference(rank: int, n: int, what: str) -> None:
    """Wraps a model that differs on rank 1 (rank 2 for "more"), or with an option that differs on rank 1."""
    module = nn.Linear(4, 5 if rank == 1 and what == "shape" else 3)
    if rank == 1 and what == "frozen":
        module.bias.requires_grad = False
    if rank == 2 and what == "more":
        module.extra = nn.Parameter(torch.zeros(2))
    topology = "ring" if rank == 1 and what == "topology" else "complete"
    options: dict[str, Any] = {"bucket": {"bucket_size_in_mb": 1.5}, "transport": {"transport": "collective"}}
    DecentralizedDataParallel(module, optimizer=SGD, topology=topology, **options.get(what, {}) if rank == 1 else {})


def exit_while_wrapping(rank: int, n: int, module: str, function: str) -> None:
    """The last rank exits where it would call a function of decentnode.parallel whose collective the others enter."""
    if rank == n - 1:
        setattr(importlib.import_module(f"decentnode.parallel.{module}"), function, lambda *_: os._exit(1))
    DecentralizedDataParallel(model(), optimizer=SGD, topology="complete", transport="auto")


def kill_in_collective_operation(rank: int, n: int) -> None:
    """The last rank is killed inside a collective operation, which rank 0 enters late."""
    with succeed_on_all_ranks("look for the file"):
        pass
    if rank == n - 1:
        agreement.gather_texts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    elif rank == 0:
        time.sleep(0.5)
    with succeed_on_all_ranks("open the file"):
        pass


def stop_taking_part(rank: int, n: int, transport: str, notice_file: str) -> None:
    """The last rank stops after one step; its process lives until another rank has raised PeerLost and made the
    file."""
    wrapped = DecentralizedDataParallel(
        model(), optimizer=SGD, topology="exp", timeout_seconds=3, transport=transport,  # type: ignore[arg-type]
    )
    for t in range(3):
        if rank == n - 1 and t == 1:
            wait_until(lambda: os.path.exists(notice_file))
            return
        x, y = batch(rank, t)
        try:
            (wrapped(x) - y).square().mean().backward()
        except PeerLost:
            open(notice_file, "x").close()
            raise


def run_out_of_memory(rank: int, n: int, topology: str, where: str) -> None:
    """The last rank's device or host has no memory left for its second exchange."""
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


def leave_early(rank: int, n: int, how: str, transport: str, leaver: int = 1) -> None:
    """Rank `leaver` takes four steps fewer than the others.

    how: what it does then; "done": ends its training; "average": calls global_avg; "killed"; "worker left": is killed,
    while a child process still has its shared memory open."""
    wrapped = DecentralizedDataParallel(
        model(), optimizer=SGD, topology="ring", timeout_seconds=1000, bucket_size_in_mb=0,
        transport=transport,  # type: ignore[arg-type]
    )
    for t in range(5 if rank == leaver else 9):
        x, y = batch(rank, t)
        (wrapped(x) - y).square().mean().backward()
    if rank != leaver or how == "done":  # the wrapper goes out of scope and is closed; a barrier comes next
        return
    if how == "average":
        wrapped.global_avg()
    if how == "worker left" and os.fork() == 0:  # like a data loader's worker: it has the rank's shared memory open
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if "decentnode-ddp" not in os.readlink(f"/proc/self/fd/{number}"):
                    os.close(number)
        rank_0 = wrapped._gossip.exchange._presence._segments[0]  # type: ignore[attr-defined]
        with contextlib.suppress(AssertionError):  # nobody reaps this process: it must not outlive the test
            wait_until(rank_0.owner_is_gone, seconds=300)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


class DiskFull(OSError):
    pass


def fail_to_start_on_rank_1(rank: int, n: int, what: str) -> tuple[str, float]:
    """Wraps a model where a system call, the model or the optimizer fails on rank 1. Returns (the error, the sum of 1
    over the ranks by an all_reduce that comes next). what: the call, "model" or "optimizer"."""

    def raise_disk_full(*_: object, **__: object) -> Any:
        raise DiskFull(errno.ENOSPC, "No space left on device")

    opened = os.open

    def open_own_segment_only(path: Any, flags: int, *mode: int) -> int:
        is_own = flags & os.O_CREAT or "decentnode-ddp" not in str(path)
        return opened(path, flags, *mode) if is_own else raise_disk_full()

    if rank == 1:
        module_of_call: Any = {"mmap": mmap}.get(what.partition(".")[0], os)
        setattr(module_of_call, what.partition(".")[2],
                open_own_segment_only if what == "os.open" else raise_disk_full)  # fmt: skip
    module = nn.Sequential() if rank == 1 and what == "model" else model()
    optimizer = raise_disk_full if rank == 1 and what == "optimizer" else SGD
    error_text = ""
    try:
        DecentralizedDataParallel(module, optimizer=optimizer, topology="ring", transport="shared_memory")
    except (OSError, ValueError, AssemblyError) as error:
        error_text = f"{type(error).__name__}: {error}"
    total = torch.ones(1)
    dist.all_reduce(total)
    return error_text, float(total)


def leave_and_ask_presence(rank: int, n: int, how: str, folder: str) -> str:
    """Rank 1 closes or drops its presence while its process lives on. Returns on rank 0 why it counts as absent, "" if
    it does not. how: "stays", "closed", "forgotten" (garbage-collected), "forgotten by a child" (in a fork)."""
    paths = [Path(folder, str(r)) for r in range(n)]
    own = Segment.create(paths[rank], 2 * PAGE, PAGE, watched=True)
    dist.barrier()
    segments = [own if r == rank else Segment.attach(p, 2 * PAGE, PAGE, watched=True) for r, p in enumerate(paths)]
    presence: Presence | None = Presence(segments, [segment.words(0, WORDS) for segment in segments], rank)
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


def end_and_kill(rank: int, n: int, folder: str, progress: dict[int, tuple[int, int]]) -> None:
    """Rank 1 ends its training, then rank 2 is killed. Rank 0 raises PeerLost with the rank that it finds absent.
    progress: {rank: (steps that it took, averages that it entered)}."""
    paths = [Path(folder, str(r)) for r in range(n)]
    own = Segment.create(paths[rank], 2 * PAGE, PAGE, watched=True)
    dist.barrier()
    segments = [own if r == rank else Segment.attach(p, 2 * PAGE, PAGE, watched=True) for r, p in enumerate(paths)]
    presence = Presence(segments, [segment.words(0, WORDS) for segment in segments], rank)
    steps, averages = progress[rank]
    presence.at_step(steps)
    for _ in range(averages):
        presence.enter_average()
    dist.barrier()
    if rank == 1:
        presence.close()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        wait_until(segments[2].owner_is_gone)
        absence = presence.absent([1, 2])
        assert absence is not None
        raise PeerLost(absence.reason, [absence.rank])


def exit_before_wrapping(rank: int, n: int) -> None:
    """The last rank's process exits before it wraps its model."""
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
    for reporter in range(n):
        if reporter == rank:
            if how == "error":
                sys.last_value = ValueError(text) if rank == 0 else PeerLost(text)
            rank_status.report_end()
        dist.barrier()
    return rank_status.first_reported_end() if rank == 0 else (rank, rank_status.first_reported_end())


def kill_before_average(rank: int, n: int, transport: Any) -> float | None:
    """The last rank is killed while the others call global_avg, once they have all wrapped their models."""
    wrapped = DecentralizedDataParallel(model(), optimizer=SGD, topology="ring", transport=transport)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"wrapped {rank}", "")
    if rank == n - 1:
        store.wait([f"wrapped {each}" for each in range(n)])
        os.kill(os.getpid(), signal.SIGKILL)
    return wrapped.global_avg(return_d2c=True)


def kill_while_mapping_memory(rank: int, n: int) -> None:
    """The last rank is killed when it has made its segment of shared memory. Raises AssertionError on the others if a
    file name of any segment is left."""
    paths: list[Path] = []
    create = Segment.create

    def create_and_die(path: Path, *more: Any, **keys: Any) -> Segment:
        paths.append(path)
        segment = create(path, *more, **keys)
        if rank == n - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return segment

    Segment.create = create_and_die  # type: ignore[method-assign, assignment]
    try:
        DecentralizedDataParallel(model(), optimizer=SGD, topology="complete", transport="shared_memory")
    except (AssemblyError, PeerLost, RuntimeError):
        token = paths[0].name.rpartition("-")[0]
        assert not any(paths[0].with_name(f"{token}-{r}").exists() for r in range(n)), "a name is left"
    else:
        raise AssertionError("the model was wrapped although a rank was killed")
