"""Runs a function as the n ranks of a torch process group, each rank in a process of its own."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "tests.parallel.work.training"])


IN_STACK = re.compile(r'([^/"]+", line \d+ in \S+)')
"""The file's name, the line and the function of a call in a stack that `faulthandler` has written."""


def start_process(stacks: Path, work: Callable[..., Any], *args: Any) -> Any:
    """Starts a process that calls work(*args), with the current environment variables, and returns it. The file
    `stacks` is for `stacks_of`."""
    process = CONTEXT.Process(target=_run, args=(dict(os.environ), stacks, work, args))
    process.start()
    return process


def _run(environment: dict[str, str], stacks: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()  # of the test that started the fork server
    os.environ.update(environment)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        work(*args)


def _run_rank(work: Callable[..., Any], rank: int, n: int, store: str, pipe: Connection, args: tuple[Any, ...],
              backend: str, device: str) -> None:  # fmt: skip
    """Runs in the child process: sends (True, result) or (False, traceback)."""
    import torch
    import torch.distributed as dist

    from tests.parallel.work import models

    torch.set_num_threads(1)
    os.environ.update(LOCAL_WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    try:
        if device == "cuda":
            torch.backends.cudnn.deterministic = True  # tests compare the bits of two trainings
            models.DEVICE = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(models.DEVICE)
        else:
            torch.cuda.is_available = lambda: False  # compat.decent_dp would move models to a GPU
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
    """Returns [work(rank, n, *args) for each rank], where `work` is a function of a module. Raises AssertionError with
    the traceback of the first rank that failed.

    device: with "cuda", models and batches of `work.models` lie on the GPUs, which the ranks take in turn.
    """
    outcomes = outcomes_of_ranks(n, work, *args, timeout_seconds=timeout_seconds, backend=backend, device=device)
    for succeeded, value in outcomes:
        assert succeeded, value
    return [value for _, value in outcomes]


def outcomes_of_ranks(n: int, work: Callable[..., Any], *args: Any, timeout_seconds: float = 200,
                      backend: str = "gloo", device: str = "cpu") -> list[tuple[bool, Any]]:  # fmt: skip
    """As `run_ranks`, for tests in which ranks fail: returns by rank (True, result), or (False, "rank R: Error: ..."
    with the traceback). Raises AssertionError with the stacks of all ranks if one sends nothing for
    `timeout_seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], {}
        for rank in range(n):
            mine, theirs = CONTEXT.Pipe()
            stacks = Path(folder, f"stacks-{rank}")
            processes[stacks] = start_process(stacks, _run_rank, work, rank, n, f"{folder}/store", theirs, args,
                                              backend, device)  # fmt: skip
            theirs.close()
            pipes.append(mine)
        try:
            outcomes = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout_seconds), f"process {rank} hangs; {stacks_of(processes)}"
                try:
                    outcomes.append(pipe.recv())
                except EOFError:
                    outcomes.append((False, f"rank {rank} ended without a result"))
            return outcomes
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def stacks_of(processes: dict[Path, Any]) -> str:
    """Returns a line with where the main thread of each process is, as far as it fits in a message that is cut, then
    the Python stacks of all threads of those that live. processes: by the file that they were started with. Blocking
    for a second."""
    for file, process in processes.items():
        if process.is_alive() and file.exists():
            os.kill(process.pid, signal.SIGUSR2)
    time.sleep(1)
    stacks = {file.name: file.read_text() if file.exists() else "did not start" for file in processes}
    places = [" < ".join(IN_STACK.findall(stack.rpartition("Current thread")[2])[:2]) for stack in stacks.values()]
    lines = [f"process {number}: {place or 'has no stack'}" for number, place in enumerate(places)]
    return "; ".join(lines) + "".join(f"\n{name}:\n{stack}" for name, stack in stacks.items())
