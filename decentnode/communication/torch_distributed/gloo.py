"""Point-to-point tensors over torch.distributed's gloo, without its default group: one communicator per clique."""

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

from decentnode.communication.torch_distributed.calls import NEVER, Calls

logger = logging.getLogger(__name__)

TAGS = 1 << 30
Failed = Callable[[RuntimeError | MemoryError], None]
_abandoned: list[object] = []


def listen(host: str, timeout_seconds: float) -> dist.TCPStore:
    """A store on a free port, for the members of one clique to find each other."""
    return dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout_seconds), False)


def connect(host: str, port: int, prefix: str, timeout_seconds: float) -> dist.Store:
    """The clique's store, with keys of one generation alone. Raises RuntimeError when nobody listens in time."""
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_seconds), False)
    return dist.PrefixStore(prefix, store)


def in_file(path: Path, members: int, timeout_seconds: float) -> dist.Store:
    """The store of a clique on one host, in a file that its last member removes. It listens nowhere, and does not ask
    the DNS for the name of ::ffff:127.0.0.1 as a TCPStore does, which takes seconds where no answer comes."""
    store = dist.FileStore(str(path), members)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def make_group(store: dist.Store, rank: int, size: int, via: str, timeout_seconds: float) -> Any:
    """A gloo backend at the interface with address `via`, in no registry of torch. Blocking. Raises RuntimeError."""
    gloo: Any = dist.ProcessGroupGloo  # its p2p calls and options are missing in the type stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=via)]
    options._timeout = timedelta(seconds=timeout_seconds)
    return gloo(store, rank, size, options)


def abandon(group: object) -> None:
    """Keep a communicator with operations under way alive: its destructor would free buffers that it writes to."""
    _abandoned.append(group)


def own_address(host: str) -> str:
    """The address of the interface that leads to `host`; sends nothing. Raises OSError without a route."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Connection(threading.Thread):
    """Jobs of one peer in one direction, one after the other: waiting for gloo has no other form."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Failed] | None] = queue.SimpleQueue()
        self.start()

    def put(self, job: Callable[[], None], failed: Failed) -> None:
        """Any thread. failed: called on the line's thread with what `job` raised; the line then ends, and jobs that
        come later are left out."""
        self._jobs.put((job, failed))

    def end(self) -> None:
        """Any thread: the line ends after the jobs that it has."""
        self._jobs.put(None)

    def run(self) -> None:
        while (found := self._jobs.get()) is not None:
            job, failed = found
            try:
                job()
            except (RuntimeError, MemoryError) as error:
                logger.debug("%s ended: %s", self.name, error)
                failed(error)
                return


class _Broken:
    """The wait for what could not even be launched."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def __call__(self) -> object:
        raise self._error


class GlooClique:
    """One generation's communicator of `members`, ranks in their order. Every call may come from any thread."""

    def __init__(
        self, store: dist.Store, uid: int, members: tuple[int, ...], via: str, timeout_seconds: float
    ) -> None:
        """Blocking until all members called it. via: the address of the own interface. Raises RuntimeError."""
        self.uid, self.peers = uid, frozenset(members) - {uid}
        self._rank = {member: rank for rank, member in enumerate(members)}
        self._group = make_group(store, self._rank[uid], len(members), via, timeout_seconds)
        self.calls = Calls(self._group, members)
        self._lock = threading.Lock()
        self._lines: dict[tuple[int, bool], Connection] = {}

    def send(self, uid: int, tensor: Tensor, tag: int) -> Callable[[], object]:
        """tensor: on the CPU, unchanged until the returned wait is over. Not blocking. A connection that broke already
        is told of by the wait, as one that breaks later is."""
        return self.call(lambda: self._group.send([tensor], self._rank[uid], tag % TAGS))

    def receive(self, uid: int, tensor: Tensor, tag: int) -> Callable[[], object]:
        """As `send`, into `tensor`."""
        return self.call(lambda: self._group.recv([tensor], self._rank[uid], tag % TAGS))

    def call(self, launch: Callable[[], Any]) -> Callable[[], object]:
        """One of `calls`, which all members make in the same order."""
        try:
            with self._lock:
                work = launch()
        except RuntimeError as error:
            return _Broken(error)
        return lambda: work.wait(NEVER)

    def line(self, uid: int, out: bool) -> Connection:
        """That of a peer and a direction; that from the node itself is for `calls`."""
        if (uid, out) not in self._lines:
            self._lines[uid, out] = Connection(f"gloo {self.uid} {'to' if out else 'from'} {uid}")
        return self._lines[uid, out]

    def close(self, clean: bool) -> None:
        """clean: nothing is under way."""
        for line in self._lines.values():
            line.end()
        if clean:
            for line in self._lines.values():
                line.join(1.0)
        if not clean or any(line.is_alive() for line in self._lines.values()):
            abandon(self._group)
