"""Point-to-point transfers of tensors over torch.distributed's gloo, without its default group: one communicator per
clique."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from decentnode.communication.torch_distributed.calls import NO_TIMEOUT, Calls

logger = logging.getLogger(__name__)

TAGS = 1 << 30
ErrorHandler = Callable[[RuntimeError | MemoryError], None]
_abandoned: list[object] = []


def listen(host: str, timeout_seconds: float) -> dist.TCPStore:
    """Opens a store on a free port, at which the members of one clique meet."""
    return dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout_seconds), False)


def connect(host: str, port: int, prefix: str, timeout_seconds: float) -> dist.Store:
    """Connects to the clique's store, with a prefix for the keys of one generation. Raises RuntimeError if nothing
    listens in time."""
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_seconds), False)
    return dist.PrefixStore(prefix, store)


def file_store(path: Path, members: int, timeout_seconds: float) -> dist.Store:
    """Returns the store of a clique on one host, in a file that its last member removes. It does not listen. Nor does
    it resolve the name of ::ffff:127.0.0.1 as a TCPStore does, which takes seconds if no DNS server answers."""
    store = dist.FileStore(str(path), members)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def make_group(store: dist.Store, rank: int, size: int, via: str, timeout_seconds: float) -> Any:
    """Blocks until all members have called it. Returns a gloo backend on the interface with address `via`, in no
    registry of torch. Raises RuntimeError."""
    gloo: Any = dist.ProcessGroupGloo  # its p2p calls and options are missing in the type stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=via)]
    options._timeout = timedelta(seconds=timeout_seconds)
    return gloo(store, rank, size, options)


def abandon(group: object) -> None:
    """Keeps a communicator with operations in flight alive: its destructor would free buffers that it still writes
    to."""
    _abandoned.append(group)


def own_address(host: str) -> str:
    """Returns the address of the interface that leads to `host`; sends nothing. Raises OSError without a route."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class PeerThread(threading.Thread):
    """A thread that runs the jobs of one peer in one direction one after the other. gloo has only a blocking wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], ErrorHandler] | None] = queue.SimpleQueue()
        self.start()

    def put(self, job: Callable[[], None], on_error: ErrorHandler) -> None:
        """Any thread: adds a job. on_error: called on this thread with what `job` raised; the thread then ends, and
        later jobs are ignored."""
        self._jobs.put((job, on_error))

    def end(self) -> None:
        """Any thread: ends the thread after the jobs that it has."""
        self._jobs.put(None)

    def run(self) -> None:
        while (found := self._jobs.get()) is not None:
            job, on_error = found
            try:
                job()
            except (RuntimeError, MemoryError) as error:
                logger.debug("%s ended: %s", self.name, error)
                on_error(error)
                return


class _FailedLaunch:
    """The wait for an operation that could not be launched: raises the error."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def __call__(self) -> object:
        raise self._error


class GlooClique:
    """One generation's communicator of `members`, with ranks in their order. Any thread may call every method."""

    def __init__(
        self, store: dist.Store, uid: int, members: tuple[int, ...], via: str, timeout_seconds: float
    ) -> None:
        """Blocks until all members have called it. via: the address of this node's interface. Raises RuntimeError."""
        self.uid, self.peers = uid, frozenset(members) - {uid}
        self._rank = {member: rank for rank, member in enumerate(members)}
        self._group = make_group(store, self._rank[uid], len(members), via, timeout_seconds)
        self.calls = Calls(self._group, members)
        self._lock = threading.Lock()
        self._threads: dict[tuple[int, bool], PeerThread] = {}

    def send(self, uid: int, tensor: Tensor, tag: int) -> Callable[[], object]:
        """Starts to send a tensor on the CPU, which must not change until the returned wait is over. Does not block. If
        the connection is already broken, the wait raises the error, as it does if the connection breaks later."""
        return self.call(lambda: self._group.send([tensor], self._rank[uid], tag % TAGS))

    def receive(self, uid: int, tensor: Tensor, tag: int) -> Callable[[], object]:
        """Starts to receive into `tensor`, as `send` does."""
        return self.call(lambda: self._group.recv([tensor], self._rank[uid], tag % TAGS))

    def call(self, launch: Callable[[], Any]) -> Callable[[], object]:
        """Launches one of `calls`, which all members make in the same order. Returns its wait."""
        try:
            with self._lock:
                work = launch()
        except RuntimeError as error:
            return _FailedLaunch(error)
        return lambda: work.wait(NO_TIMEOUT)

    def thread_for(self, uid: int, out: bool) -> PeerThread:
        """Returns the thread of a peer and direction; `calls` use the one from this node to itself."""
        if (uid, out) not in self._threads:
            self._threads[uid, out] = PeerThread(f"gloo {self.uid} {'to' if out else 'from'} {uid}")
        return self._threads[uid, out]

    def close(self, clean: bool) -> None:
        """Ends the threads. clean: whether nothing is in flight."""
        for thread in self._threads.values():
            thread.end()
        if clean:
            for thread in self._threads.values():
                thread.join(1.0)
        if not clean or any(thread.is_alive() for thread in self._threads.values()):
            abandon(self._group)
