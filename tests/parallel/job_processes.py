"""Processes that found an elastic job (missing="regroup"), join it while it runs, and are killed."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.parallel.ranks import CONTEXT, stacks_of, start_process


def _run_work(work: Callable[..., Any], environment: dict[str, str], pipe: Connection, args: tuple[Any, ...],
              gpu: int | None) -> None:  # fmt: skip
    """Runs in the child process: calls work(pipe, *args) and sends its result, or its exception as text."""
    import torch

    from tests.parallel.work import models

    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        if gpu is not None:
            torch.backends.cudnn.deterministic = True  # tests compare the bits of two trainings
            models.DEVICE = torch.device("cuda", gpu % torch.cuda.device_count())
            torch.cuda.set_device(models.DEVICE)
        pipe.send(("result", work(pipe, *args)))
    except BaseException as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    pipe.poll(None)  # keeps this process's sockets and shared memory open until the others have their results
    os._exit(0)


class JobProcesses:
    """The processes of one job. Leaving the context kills and reaps all of them."""

    def __init__(self, timeout_seconds: float = 60.0, environment: dict[str, str] | None = None,
                 device: str = "cpu") -> None:  # fmt: skip
        """timeout_seconds: the longest wait for a process's next value or its exit. environment: variables for all
        processes, beside those that each is given. device: with "cuda", models and batches lie on the GPUs, which the
        processes take in turn."""
        self._timeout_seconds, self._environment, self._device = timeout_seconds, environment or {}, device
        self._processes: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> JobProcesses:
        return self

    def start(self, work: Callable[..., Any], environment: dict[str, str], *args: Any) -> int:
        """Starts a process that calls work(pipe, *args), where `work` is a function of a module. Returns the number of
        the process, which counts from 0 in the order of starting."""
        mine, theirs = CONTEXT.Pipe()
        gpu = len(self._processes) if self._device == "cuda" else None
        process = start_process(self._stacks(len(self._processes)), _run_work, work, self._environment | environment,
                                theirs, args, gpu)  # fmt: skip
        theirs.close()
        self._processes.append((process, mine))
        return len(self._processes) - 1

    def start_founders(self, n: int, port: int, work: Callable[..., Any], *args: Any) -> None:
        """Starts ranks 0 to n - 1, which rendezvous at a store on `port`."""
        for rank in range(n):
            self.start(work, torchrun_environment(rank, n, port), *args)

    def receive(self, number: int) -> Any:
        """Returns the next value that a process sends, or the result of its work. Blocks. Raises AssertionError with
        the traceback if its work failed."""
        kind, value = self._next_message(number)
        assert kind != "failed", value
        return value

    def receive_failure(self, number: int) -> str:
        """Returns the exception with which the work of a process failed, as text. Blocks."""
        kind, value = self._next_message(number)
        assert kind == "failed", value
        return str(value)

    def _next_message(self, number: int) -> tuple[str, Any]:
        _, pipe = self._processes[number]
        if not pipe.poll(self._timeout_seconds):
            processes = {self._stacks(number): process for number, (process, _) in enumerate(self._processes)}
            raise AssertionError(f"process {number} hangs; {stacks_of(processes)}")
        try:
            kind, value = pipe.recv()
        except EOFError:
            raise AssertionError(f"process {number} ended without a result") from None
        return kind, value

    def _stacks(self, number: int) -> Path:
        return Path(self._folder.name, f"stacks-{number}")

    def send(self, number: int, value: Any = None) -> None:
        self._processes[number][1].send(value)

    def wait_for_exit(self, number: int) -> int | None:
        """Returns the exit code of a process that was killed, None if it still runs at the time-out. Blocks."""
        process = self._processes[number][0]
        process.join(self._timeout_seconds)
        return process.exitcode

    def __exit__(self, *_: object) -> None:
        for process, _pipe in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def torchrun_environment(rank: int, n: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank of a job on one machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
