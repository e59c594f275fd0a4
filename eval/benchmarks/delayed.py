"""A slow network for benchmarks on one host: operations of torch.distributed that take as long as over a given link.

Every rank has a full-duplex link: bytes leave one after the other at its rate and arrive `latency_seconds` later. The
real operation, over gloo, starts at the moment when the modeled one would end.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PendingOperation:
    """The handle of an operation that another thread performs."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the operation. Raises RuntimeError if it takes longer than `timeout`."""
        if not self.done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the operation timed out")
        return True


class DelayedLink:
    """One rank's link; to be created by all ranks together, after the process group."""

    def __init__(self, bits_per_second: float, latency_seconds: float) -> None:
        self.bytes_per_second, self.latency_seconds = bits_per_second / 8, latency_seconds
        self._free_at = 0.0
        self._jobs: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._group = dist.new_group()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            due, job = self._jobs.get()
            time.sleep(max(0.0, due - time.monotonic()))
            job()

    def _post(self, size_bytes: float, latencies: int, job: Callable[[], None]) -> None:
        """Runs `job` at the moment when `size_bytes` would have left and the last of them arrived, `latencies`
        latencies later."""
        self._free_at = max(time.monotonic(), self._free_at) + size_bytes / self.bytes_per_second
        self._jobs.put((self._free_at + latencies * self.latency_seconds, job))

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[Any]:
        """Replaces torch.distributed's function of this name."""
        return [self._send(o) if o.op is dist.isend else dist.irecv(o.tensor, o.peer) for o in operations]

    def _send(self, operation: dist.P2POp) -> PendingOperation:
        pending = PendingOperation()

        def job() -> None:
            dist.send(operation.tensor, operation.peer)
            pending.done.set()

        self._post(operation.tensor.numel() * operation.tensor.element_size(), 1, job)
        return pending

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # noqa: ARG002
        """A communication hook of DistributedDataParallel: its default, timed as a ring all-reduce over such links.

        For each bucket every rank sends 2 (n - 1) / n of it, in 2 (n - 1) messages that depend on each other.
        """
        n, gradient = dist.get_world_size(), bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def job() -> None:
            dist.all_reduce(gradient, group=self._group)
            future.set_result(gradient.div_(n))

        self._post(2 * (n - 1) / n * gradient.numel() * gradient.element_size(), 2 * (n - 1), job)
        return future
