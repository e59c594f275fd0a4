"""Processes that found a job whose ranks come and go, join it, and are killed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.parallel.ranks import CONTEXT


def _process(work: Callable[..., Any], environment: dict[str, str], pipe: Connection, args: tuple[Any, ...],
             gpu: int | None) -> None:  # fmt: skip
    import torch

    from tests.parallel.work import models

    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        if gpu is not None:
            torch.backends.cudnn.deterministic = True  # the bits of one training are compared with those of another
            models.DEVICE = torch.device("cuda", gpu % torch.cuda.device_count())
            torch.cuda.set_device(models.DEVICE)
        pipe.send(("result", work(pipe, *args)))
    except BaseException as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    pipe.poll(60)  # what it holds stays open until all have their results
    os._exit(0)


class Crowd:
    """A context whose processes are gone when it ends."""

    def __init__(self, seconds: float = 60.0, environment: dict[str, str] | None = None, device: str = "cpu") -> None:
        """environment: of all processes, beside what each is given. device: cuda puts models and batches on the GPUs,
        which processes take in turn."""
        self._seconds, self._environment, self._device = seconds, environment or {}, device
        self._all: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Crowd:
        return self

    def start(self, work: Callable[..., Any], environment: dict[str, str], *args: Any) -> int:
        """Starts work(pipe, *args), a module's function; the number of the process here."""
        mine, theirs = CONTEXT.Pipe()
        gpu = len(self._all) if self._device == "cuda" else None
        process = CONTEXT.Process(target=_process, args=(work, self._environment | environment, theirs, args, gpu))
        process.start()
        theirs.close()
        self._all.append((process, mine))
        return len(self._all) - 1

    def found(self, n: int, port: int, work: Callable[..., Any], *args: Any) -> None:
        """Starts the ranks 0 to n - 1, whose store is at `port`."""
        for rank in range(n):
            self.start(work, environment_of(rank, n, port), *args)

    def hear(self, number: int) -> Any:
        """Blocking: what a process says next, or its result."""
        _, pipe = self._all[number]
        assert pipe.poll(self._seconds), f"process {number} hangs"
        kind, value = pipe.recv()
        assert kind != "failed", value
        return value

    def failure(self, number: int) -> str:
        """Blocking: how a process failed."""
        _, pipe = self._all[number]
        assert pipe.poll(self._seconds), f"process {number} hangs"
        kind, value = pipe.recv()
        assert kind == "failed", value
        return str(value)

    def say(self, number: int, what: Any = None) -> None:
        self._all[number][1].send(what)

    def ended(self, number: int) -> int | None:
        """Blocking: the exit code of a process that is killed."""
        process = self._all[number][0]
        process.join(self._seconds)
        return process.exitcode

    def __exit__(self, *_: object) -> None:
        for process, _pipe in self._all:
            process.kill()
            process.join()


def environment_of(rank: int, n: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
