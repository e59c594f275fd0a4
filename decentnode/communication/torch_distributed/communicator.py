"""One communicator of torch.distributed per clique, used for batches of point-to-point operations: gloo between CPUs,
NCCL between GPUs.

Both backends share the code of `batch`. What only CUDA can run is in `NcclCommunicator`, with its tests in tests/gpu.
It is written from torch 2.13's sources and NCCL's documentation; it has run on no GPU yet.
"""

from __future__ import annotations

import abc
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode import clock
from decentnode.communication.torch_distributed.calls import NO_TIMEOUT, Calls
from decentnode.communication.torch_distributed.gloo import abandon, make_group

logger = logging.getLogger(__name__)

MAX_OPERATIONS = 256
"""R4: most operations in one batch. NCCL splits larger groups differently on different ranks, and hangs
(pytorch#174288)."""
MAX_CTAS = 8
"""Multiprocessors of the GPU that a batch's kernels may occupy while they wait for a peer (R8; an H200 has 132)."""
ABORT_SECONDS = 10.0
POLL_SECONDS = 1e-3
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Environment variables that disable torch's watchdog, which would end the whole process: the run keeps its own
deadlines. Variables that are already set are kept."""


class Communicator(abc.ABC):
    """Used from one issuing thread (R6, R10); another thread may wait for its batches."""

    device: torch.device
    """The device on which tensors must be."""

    def __init__(self, uid: int, members: Sequence[int]) -> None:
        """members: uids by rank."""
        self.uid = uid
        self.peers = frozenset(members) - {uid}
        self._rank = {member: rank for rank, member in enumerate(members)}
        self._group: Any = None

    @property
    def calls(self) -> Calls:
        """The collective calls; made from the issuing thread, in the order of batches."""
        return Calls(self._group, tuple(self._rank), scatters=self.device.type == "cuda")

    def batch(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Any]:
        """Launches one batch of point-to-point operations with all peers (R3), in ascending order of peers; over NCCL
        sends first, over gloo receives first. Returns what `wait` takes. Does not block.

        sends, receives: (uid, contiguous tensor on `device`), unchanged until the batch was waited for. Every send
        needs a receive of the same size in the peer's batch with the same number (R1): neither backend reports a
        missing one. Raises ValueError for more than MAX_OPERATIONS, RuntimeError if a connection broke.
        """
        if len(sends) + len(receives) > MAX_OPERATIONS:
            raise ValueError(
                f"a batch must have at most {MAX_OPERATIONS} operations, got {len(sends) + len(receives)}"
            )
        if not sends and not receives:
            return []
        # torch's batch_isend_irecv does this, but up to torch 2.6 only for groups in its registry of global ranks
        coalesces = self.device.type == "cuda"  # NCCL
        if coalesces:
            self._group._start_coalescing(self.device)
        sending = [(self._group.send, tensor, uid) for uid, tensor in sorted(sends, key=_uid)]
        receiving = [(self._group.recv, tensor, uid) for uid, tensor in sorted(receives, key=_uid)]
        # gloo queues the notice that a peer may send behind the data on the connection: after a send, behind all of it
        order = [*sending, *receiving] if coalesces else [*receiving, *sending]
        works = [operation([tensor], self._rank[uid], 0) for operation, tensor, uid in order]
        return [self._group._end_coalescing(self.device)] if coalesces else works

    @abc.abstractmethod
    def wait(self, works: list[Any], timeout_seconds: float | None = None) -> None:
        """Blocks until a batch is complete: any stream may then read what it received. Raises RuntimeError.

        timeout_seconds: None if those who wait for the batch's payloads keep deadlines of their own. After a time-out
        the communicator can no longer be used.
        """

    @abc.abstractmethod
    def leave(self, clean: bool) -> None:
        """Gives the communicator up. clean: whether nothing is in flight."""


class GlooCommunicator(Communicator):
    """A communicator between CPUs, which also runs NCCL's path without a GPU."""

    def __init__(
        self, store: dist.Store, uid: int, members: Sequence[int], via: str, timeout_seconds: float
    ) -> None:
        """Blocks until all members have called it. Raises RuntimeError."""
        super().__init__(uid, members)
        self.device = torch.device("cpu")
        rank, size = self._rank[uid], len(members)
        self._backend = make_group(store, rank, size, via, timeout_seconds)
        self._group = _as_process_group(store, rank, size, self._backend, self.device, "GLOO")

    def wait(self, works: list[Any], timeout_seconds: float | None = None) -> None:
        limit = NO_TIMEOUT if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        for work in works:
            work.wait(limit)

    def leave(self, clean: bool) -> None:
        if not clean:
            abandon(self._group)


class NcclCommunicator(Communicator):
    """A communicator between GPUs, one node per GPU. It has never run so far: tests/gpu has what a world of one node
    can test."""

    def __init__(
        self, store: dist.Store, uid: int, members: Sequence[int], device: torch.device, timeout_seconds: float
    ) -> None:
        """Blocks until all members have called it. Raises RuntimeError.

        The communicator is created eagerly, on `device` only (R5: a lazy one makes the first batch depend on all ranks,
        and creates one more communicator per pair).
        """
        super().__init__(uid, members)
        self.device = device
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
        rank, size, nccl = self._rank[uid], len(members), dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options.is_high_priority_stream, options.config.max_ctas = True, MAX_CTAS
        self._backend = nccl(store, rank, size, options)
        self._group = _as_process_group(store, rank, size, self._backend, device, "NCCL")
        self._group.bound_device_id = device
        self._backend.eager_connect_single_device(device)
        self._backend._set_default_timeout(NO_TIMEOUT)
        self._wait_stream = torch.cuda.Stream(device)

    def wait(self, works: list[Any], timeout_seconds: float | None = None) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._wait_stream):
            for work in works:
                work.wait()  # R9: this stream waits, not this thread
            if timeout_seconds is None:
                self._wait_stream.synchronize()
                return
            deadline = clock.now() + timeout_seconds
            while not self._wait_stream.query():
                if clock.now() > deadline:
                    raise RuntimeError(f"a batch of NCCL was not over after {timeout_seconds:g} s")
                clock.sleep(POLL_SECONDS)

    def leave(self, clean: bool) -> None:
        """Shuts down or aborts. An abort may itself hang (nccl#863): after ABORT_SECONDS it is left to the end of the
        process."""
        backend: Any = self._backend
        shutdown = backend.shutdown if hasattr(backend, "shutdown") else backend._shutdown  # the latter in torch 2.6
        end = threading.Thread(target=shutdown if clean else backend.abort, name=f"nccl {self.uid} ends", daemon=True)
        end.start()
        end.join(ABORT_SECONDS)
        if end.is_alive():
            logger.warning("the NCCL communicator of node %d does not shut down", self.uid)
            abandon(self._group)


def _uid(entry: tuple[int, Tensor]) -> int:
    return entry[0]


def _as_process_group(
    store: dist.Store, rank: int, size: int, backend: Any, device: torch.device, kind: Literal["GLOO", "NCCL"]
) -> Any:
    """Returns the backend wrapped in a ProcessGroup, which torch's functions take, outside torch's registry."""
    group: Any = dist.ProcessGroup(store, rank, size)
    kinds: Any = dist.ProcessGroup.BackendType
    group._register_backend(torch.device(device.type), getattr(kinds, kind), backend)
    group._set_default_backend(getattr(kinds, kind))
    return group


def describe_gpu(device: torch.device) -> str:
    """Returns what `refusal` compares: NCCL's version and the GPU's identity; empty if either is missing."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{version} {torch.cuda.get_device_properties(device).uuid}"


def gpu_number(device: torch.device) -> int:
    """Returns a number in (0, 2^40) that identifies the GPU on every node, and is exact in a mean of doubles; 0 for
    other devices."""
    if device.type != "cuda":
        return 0
    identity = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=5).digest(), "big") or 1


def refusal(found: dict[int, str], who: str = "node") -> str:
    """Returns why these nodes cannot share one NCCL communicator, by their `describe_gpu`; empty if they can. who: what
    the numbers identify, for the message."""
    without = sorted(uid for uid, text in found.items() if not text)
    if without:
        return f"NCCL needs a GPU and a torch with NCCL on every {who}, {who} {without[0]} lacks one"
    by_gpu: dict[str, int] = {}
    first, versions = min(found), {uid: text.partition(" ")[0] for uid, text in found.items()}
    for uid, text in sorted(found.items()):
        gpu = text.partition(" ")[2]
        if gpu in by_gpu:
            return f"NCCL needs a GPU for each {who}, but {who}s {by_gpu[gpu]} and {uid} share {gpu}"
        by_gpu[gpu] = uid
        if versions[uid] != versions[first]:
            return (f"NCCL must have one version, got {versions[first]} on {who} {first}, {versions[uid]} on {who} "
                    f"{uid}")  # fmt: skip
    return ""


def exchange_descriptions(store: dist.Store, uid: int, members: Sequence[int], own: str) -> dict[int, str]:
    """Blocks until every member has described itself. Returns the descriptions by uid. Raises RuntimeError if one is
    missing after the time-out."""
    store.set(f"member/{uid}", own)
    return {member: store.get(f"member/{member}").decode() for member in members}
