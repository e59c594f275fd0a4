"""Runs a function as n ranks of a process group, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "tests.parallel.work.training"])


def _rank(work: Callable[..., Any], rank: int, n: int, store: str, pipe: Connection, args: tuple[Any, ...],
          backend: str, device: str) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    from tests.parallel.work import models

    torch.set_num_threads(1)
    os.environ.update(LOCAL_WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    try:
        if device == "cuda":
            torch.backends.cudnn.deterministic = True  # the bits of one training are compared with those of another
            models.DEVICE = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(models.DEVICE)
        else:
            torch.cuda.is_available = lambda: False  # Decent-DP's face moves models to a GPU where there is one
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=n,
                                device_id=models.DEVICE if backend == "nccl" else None)  # fmt: skip
        result = work(rank, n, *args)
        dist.barrier()
        pipe.send((True, result))
    except BaseException as error:
        pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)


def run_ranks(n: int, work: Callable[..., Any], *args: Any, timeout_seconds: float = 200, backend: str = "gloo",
              device: str = "cpu") -> list[Any]:  # fmt: skip
    """[work(rank, n, *args)] by rank; `work` is a module's function. Fails with the first rank's traceback.

    device: cuda puts models and batches of `work.models` on the GPUs, which ranks take in turn.
    """
    results = run_ranks_raw(n, work, *args, timeout_seconds=timeout_seconds, backend=backend, device=device)
    for ok, value in results:
        assert ok, value
    return [value for _, value in results]


def run_ranks_raw(n: int, work: Callable[..., Any], *args: Any, timeout_seconds: float = 200, backend: str = "gloo",
                  device: str = "cpu") -> list[tuple[bool, Any]]:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(n):
            mine, theirs = CONTEXT.Pipe()
            told = (work, rank, n, f"{folder}/store", theirs, args, backend, device)
            process = CONTEXT.Process(target=_rank, args=told)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            found = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout_seconds), f"rank {rank} hangs"
                try:
                    found.append(pipe.recv())
                except EOFError:
                    found.append((False, f"rank {rank} ended without a word"))
            return found
        finally:
            for process in processes:
                process.kill()
                process.join()
