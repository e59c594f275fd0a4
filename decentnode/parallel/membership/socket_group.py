"""A process group of torch.distributed over ZeroMQ sockets with keys, for the ranks of a job that has them.

gloo accepts connections from anybody, and neither gloo nor torch's store encrypts. This group has one listening socket
per process, for the life of the process, and one toward each other rank. An operation is a message, or chunks of one,
from rank to rank; for an all-reduce every rank sends all others its whole tensor, and each sums them in the order of
the ranks. So after an operation was started only a wait is left, and every wait can be interrupted.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from decentnode import clock
from decentnode.errors import LARGE_PACKETS, PeerLost
from decentnode.parallel.membership.keys import Sockets
from decentnode.wire.generation import Name
from decentnode.wire.messages import ORIGIN_BYTES

BACKEND = "decentnode"
"""The name of this backend in torch.distributed."""
HEADER = struct.Struct(f"<I{ORIGIN_BYTES}sIIQII")
"""Generation (number, origin), group, rank in the generation, operation, chunk, kind."""
CHUNK_BYTES = 1 << 22
MAX_CHUNKS_AHEAD = 1 << 14
"""Largest number of chunks received before this rank asked for them: ranks are a few operations apart at most."""
MAX_LEFT_GENERATIONS = 64
LINGER_MILLISECONDS = 3000
"""How long sockets that close may still send what other ranks need."""
POLL_SECONDS = 0.05
COLLECTIVE, POINT_TO_POINT = range(2)
"""Kinds of operations: collectives, which all ranks of a group begin in one order, and point-to-point ones."""

Key = tuple[int, int, int, int, int]
"""(kind, group, rank, operation, chunk)"""


class GroupSockets:
    """The sockets of a process's groups, used for one generation after the other."""

    def __init__(self, sockets: Sockets, host: str, port: int) -> None:
        """Raises OSError if the port is taken."""
        self._sockets = sockets
        self._listener = sockets.listener(zmq.PULL, host, port, CHUNK_BYTES, 0)
        self.endpoint: str = self._listener.getsockopt_string(zmq.LAST_ENDPOINT)
        self._senders: dict[str, zmq.Socket[bytes]] = {}
        self._peers: tuple[str, ...] = ()
        self.name: Name = (0, bytes(ORIGIN_BYTES))
        """The name of the generation."""
        self._left_generations: deque[Name] = deque(maxlen=MAX_LEFT_GENERATIONS)
        """Names of generations that this process has left. Their messages are dropped; those of unknown generations
        are kept, because another rank may begin the next generation before this one."""
        self._received: dict[tuple[Name, Key], memoryview] = {}
        self._num_made: dict[tuple[int, ...], int] = {}
        """Ranks -> number of groups of exactly these ranks that were made in this generation."""
        self._lock = threading.RLock()
        self.rank = 0

    def begin(self, name: Name, rank: int, endpoints: Sequence[str]) -> None:
        """Begins a generation. rank: this process's. endpoints: [rank] its address."""
        with self._lock:
            if name != self.name:
                self._left_generations.append(self.name)
            self.name, self.rank, self._peers = name, rank, tuple(endpoints)
            self._num_made.clear()
            self._received = {key: each for key, each in self._received.items() if key[0] not in self._left_generations}
            for endpoint in self._senders.keys() - set(endpoints):
                self._senders.pop(endpoint).close(0)

    def group(self, ranks: Sequence[int], timeout_seconds: float) -> SocketProcessGroup:
        """Makes a group of these ranks of the generation, which all of them make in the same order."""
        key = tuple(ranks)
        number = self._num_made[key] = self._num_made.get(key, 0) + 1
        return SocketProcessGroup(self, key, zlib.crc32(repr((key, number)).encode()), timeout_seconds)

    def send(self, name: Name, peer: int, key: tuple[int, int, int], data: memoryview) -> None:
        """Sends bytes to a rank. Not blocking. key: (kind, group, operation). `data` must not change afterwards."""
        kind, group, operation = key
        with self._lock:
            if name != self.name:
                return
            endpoint = self._peers[peer]
            if endpoint not in self._senders:
                self._senders[endpoint] = self._sockets.sender(zmq.PUSH, endpoint, 0, LINGER_MILLISECONDS)
            for chunk, start in enumerate(range(0, max(1, len(data)), CHUNK_BYTES)):
                head = HEADER.pack(*name, group, self.rank, operation, chunk, kind)
                self._senders[endpoint].send_multipart([head, data[start : start + CHUNK_BYTES]], copy=False)

    def receive(self, seconds: float) -> None:
        """Receives and stores messages, waiting at most so many seconds for the first."""
        with self._lock:
            if seconds and not self._listener.poll(int(1000 * seconds)):
                return
            while len(self._received) < MAX_CHUNKS_AHEAD:
                try:
                    frames = self._listener.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
                if len(frames) == 2 and len(frames[0].bytes) == HEADER.size:
                    number, origin, group, rank, operation, chunk, kind = HEADER.unpack(frames[0].bytes)
                    name = (number, origin)
                    if name == self.name or name not in self._left_generations:
                        self._received[name, (kind, group, rank, operation, chunk)] = frames[1].buffer
            raise PeerLost(f"ranks are more than {MAX_CHUNKS_AHEAD} messages ahead")

    def take_message(self, name: Name, key: tuple[int, int, int, int], size: int) -> list[memoryview] | None:
        """Returns the chunks of a message once all have arrived, else None. key: (kind, group, rank, operation). Raises
        PeerLost if their size is another one."""
        count = max(1, -(-size // CHUNK_BYTES))
        with self._lock:
            chunks = [self._received.get((name, (*key, chunk))) for chunk in range(count)]
            if any(each is None for each in chunks):
                return None
            for chunk in range(count):
                del self._received[name, (*key, chunk)]
        held = [each for each in chunks if each is not None]
        if sum(map(len, held)) != size:
            raise PeerLost(f"rank {key[2]} has sent {sum(map(len, held))} bytes where {size} were expected", [key[2]])
        return held

    def silence_hint(self, ranks: Iterable[int]) -> str:
        """As the function `silence_hint`, for ranks of the generation in force."""
        return silence_hint(self.endpoint, [self._peers[rank] for rank in ranks if rank < len(self._peers)])

    def close(self) -> None:
        for each in self._senders.values():
            each.close(LINGER_MILLISECONDS)
        self._senders.clear()
        self._listener.close(0)


def silence_hint(own: str, silent: Iterable[str]) -> str:
    """Returns the end of a sentence about ranks whose messages do not arrive: what to try if they run, which may help
    if one is on another host. own, silent: endpoints."""
    hosts = {each.rpartition(":")[0] for each in silent}
    return f"; if they run, {LARGE_PACKETS}" if hosts - {own.rpartition(":")[0]} else ""


class SocketWork:
    """An operation in flight: the part of torch.distributed's Work that its callers use."""

    def __init__(self, group: SocketProcessGroup, awaited: Mapping[int, tuple[tuple[int, int, int, int], int]],
                 end: Callable[[dict[int, Tensor]], None]) -> None:  # fmt: skip
        """awaited: rank -> (key, bytes) of the messages that the operation needs. end: is given them, as bytes [n]."""
        self._group, self._end = group, end
        self._awaited, self._found = dict(awaited), dict[int, Tensor]()
        self._is_done, self._until = False, clock.now() + group.timeout_seconds
        self._generation = group.generation

    def is_completed(self) -> bool:
        """Returns whether the operation is finished, or has timed out. Not blocking."""
        if not self._is_done:
            self._group.sockets.receive(0.0)
            self._poll()
        return self._is_done or clock.now() > self._until

    def _poll(self) -> None:
        for rank, (key, size) in list(self._awaited.items()):
            chunks = self._group.sockets.take_message(self._generation, key, size)
            if chunks is not None:
                del self._awaited[rank]
                self._found[rank] = _joined(chunks, size)
        if not self._awaited:
            self._end(self._found)
            self._is_done = True

    def wait(self, *_: Any) -> bool:
        """Waits for the operation. Blocking. Raises PeerLost naming the ranks that sent nothing in time."""
        while not self.is_completed():
            self._group.sockets.receive(POLL_SECONDS)
        if not self._is_done:
            who = ", ".join(map(str, sorted(self._awaited)))
            hint = self._group.sockets.silence_hint(self._awaited)
            raise PeerLost(f"an operation of all ranks took longer than {self._group.timeout_seconds:g} s: nothing "
                           f"came from rank {who}{hint}", sorted(self._awaited))  # fmt: skip
        return True


def _joined(chunks: Sequence[memoryview], size: int) -> Tensor:
    """Returns [size] the bytes of a message, concatenated."""
    whole = torch.empty(size, dtype=torch.uint8, device="cpu")
    at = 0
    for each in chunks:
        if len(each):
            whole[at : at + len(each)] = torch.frombuffer(bytearray(each), dtype=torch.uint8)
        at += len(each)
    return whole


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns [n] a copy of a tensor's bytes on the CPU, in the order of its elements. Blocking for a GPU."""
    plain = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)


def _view(raw: Tensor) -> memoryview:
    """Returns a view of the bytes [n], without a copy."""
    return memoryview(raw.numpy().data)


def _view_like(raw: Tensor, like: Tensor) -> Tensor:
    """Returns bytes viewed as a tensor of the dtype and shape of `like`."""
    return raw.view(like.dtype).view(like.shape)


REDUCTIONS: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (dist.ReduceOp.SUM, torch.add), (dist.ReduceOp.AVG, torch.add), (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum), (dist.ReduceOp.MAX, torch.maximum),
]  # fmt: skip


class SocketProcessGroup(dist.ProcessGroup):
    """Implements the operations that wrappers use, and some that scripts do: all_reduce, all_gather, broadcast,
    barrier, send and receive. Tensors on a GPU are copied to host memory. Other operations raise RuntimeError."""

    def __init__(self, sockets: GroupSockets, ranks: Sequence[int], number: int, timeout_seconds: float) -> None:
        """ranks: their numbers in the generation, ascending."""
        super().__init__(list(ranks).index(sockets.rank), len(ranks))  # type: ignore[call-arg]
        self.sockets, self._ranks, self._number, self.timeout_seconds = sockets, tuple(ranks), number, timeout_seconds
        self.generation = sockets.name
        self._operations = 0
        self._pairs: dict[tuple[int, bool], int] = {}

    def getBackendName(self) -> str:
        return BACKEND

    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self.sockets.rank]

    def _begin(self, to: Sequence[int], data: Tensor | None, sizes: Mapping[int, int],
               end: Callable[[dict[int, Tensor]], None]) -> SocketWork:  # fmt: skip
        """Starts a collective: sends `data` [n] bytes to the ranks `to`; expects so many bytes from each of `sizes`."""
        self._operations += 1
        if data is not None:
            raw = _view(data)
            for peer in to:
                self.sockets.send(self.generation, peer, (COLLECTIVE, self._number, self._operations), raw)
        awaited = {rank: ((COLLECTIVE, self._number, rank, self._operations), size) for rank, size in sizes.items()}
        return SocketWork(self, awaited, end)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> SocketWork:  # type: ignore[override]
        combine = next((found for op, found in REDUCTIONS if opts.reduceOp == op), None)
        if combine is None:
            raise RuntimeError(f"ranks with keys cannot all_reduce with {opts.reduceOp}")
        (tensor,) = tensors
        own = _bytes_of(tensor)

        def end(found: dict[int, Tensor]) -> None:
            parts = [own if rank == self.sockets.rank else found[rank] for rank in self._ranks]
            total = reduce(combine, (_view_like(each, tensor) for each in parts))
            tensor.detach().copy_(total.div(len(parts)) if opts.reduceOp == dist.ReduceOp.AVG else total)

        others = self._others()
        return self._begin(others, own, dict.fromkeys(others, own.numel()), end)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> SocketWork:  # type: ignore[override]
        (tensor,) = tensors
        root = self._ranks[opts.rootRank]
        if root == self.sockets.rank:
            return self._begin(self._others(), _bytes_of(tensor), {}, lambda _: None)
        size = tensor.numel() * tensor.element_size()
        return self._begin((), None, {root: size}, lambda found: _copy_into(tensor, found[root]))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> SocketWork:  # type: ignore[override]  # noqa: ARG002
        (tensors,), (tensor,) = outputs, inputs
        own = _bytes_of(tensor)

        def end(found: dict[int, Tensor]) -> None:
            for rank, each in zip(self._ranks, tensors, strict=True):
                _copy_into(each, own if rank == self.sockets.rank else found[rank])

        sizes = {rank: each.numel() * each.element_size() for rank, each in zip(self._ranks, tensors, strict=True)
                 if rank != self.sockets.rank}  # fmt: skip
        return self._begin(self._others(), own, sizes, end)

    def barrier(self, opts: Any = None) -> SocketWork:  # type: ignore[override]  # noqa: ARG002
        others, nothing = self._others(), torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._begin(others, nothing, dict.fromkeys(others, 0), lambda _: None)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> SocketWork:  # type: ignore[override]  # noqa: ARG002
        (tensor,), peer = tensors, self._ranks[to]
        number = self._pairs[peer, True] = self._pairs.get((peer, True), 0) + 1
        self.sockets.send(self.generation, peer, (POINT_TO_POINT, self._number, number), _view(_bytes_of(tensor)))
        return SocketWork(self, {}, lambda _: None)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> SocketWork:  # type: ignore[override]  # noqa: ARG002
        (tensor,), peer = tensors, self._ranks[source]
        number = self._pairs[peer, False] = self._pairs.get((peer, False), 0) + 1
        size = tensor.numel() * tensor.element_size()
        return SocketWork(self, {peer: ((POINT_TO_POINT, self._number, peer, number), size)},
                          lambda found: _copy_into(tensor, found[peer]))  # fmt: skip


def _copy_into(tensor: Tensor, raw: Tensor) -> None:
    tensor.detach().copy_(_view_like(raw, tensor))


_sockets: GroupSockets | None = None


def use_sockets(sockets: GroupSockets) -> None:
    """Makes the groups of this backend use these sockets from now on."""
    global _sockets
    _sockets = sockets
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, _: Any) -> SocketProcessGroup:
    assert _sockets is not None
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return _sockets.group(ranks, options.timeout.total_seconds())
