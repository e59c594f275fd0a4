"""Point-to-point exchanges over ZeroMQ, whose waits end as soon as a generation does.

Every rank listens at a port of its own for each generation; a message is a bucket's snapshot of one step. Received
messages are not trusted: anything else is ignored, and with keys (membership/keys.py) strangers cannot send at all.
"""

from __future__ import annotations

import json
import logging
import struct
import warnings
from collections.abc import Sequence

import torch
import xxhash
import zmq
from torch import Tensor

from decentnode import clock, entropy
from decentnode.errors import PeerLost
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.membership.addresses import format_endpoint, parse_endpoint
from decentnode.parallel.membership.keys import Sockets
from decentnode.parallel.membership.socket_group import silence_hint
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.collectives import gather_texts
from decentnode.parallel.transports.base import Flight
from decentnode.parallel.transports.host_memory import HostMemory, HostMemoryExchange
from decentnode.tensors import as_bytes

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<8sIIQQ")
"""The exchange's number, rank, bucket, step, hash of the body."""
CHECK_SECONDS = 0.05
LINGER_MILLISECONDS = 1000
"""How long sockets that close may still send what other ranks need of the last step."""
STEPS_AHEAD = 4
"""The number of steps per rank that are kept; PeerLost if ranks send more."""


class SocketExchange(HostMemoryExchange):
    """`BucketExchange` over ZeroMQ; made by all ranks together. Tensors on a GPU are copied to host memory."""

    def __init__(self, plan: Plan, timeout_seconds: float, sockets: Sockets, host: str,
                 buckets: Sequence[Bucket], memory: HostMemory) -> None:  # fmt: skip
        """Blocking. host: an address of this machine that the others can reach."""
        super().__init__(plan, timeout_seconds, memory)
        self._buckets, self._sockets = list(buckets), sockets
        self._sizes = [memory.sizes(bucket) for bucket in buckets]
        """[bucket] the sizes in bytes that it may arrive with."""
        most = max(HEADER.size, *(max(sizes) for sizes in self._sizes))
        self._listener = sockets.listener(zmq.PULL, host, 0, most, 2 * len(buckets))
        own = json.dumps([self._listener.getsockopt_string(zmq.LAST_ENDPOINT), entropy.word(8)])
        entries = [json.loads(text) for text in gather_texts(own, torch.device("cpu"), "address")]
        self._token = bytes.fromhex(str(entries[0][1]))[:8].ljust(8, b"\0")
        self._endpoints = [format_endpoint(*parse_endpoint(str(endpoint))) for endpoint, _ in entries]
        """[rank] its endpoint."""
        self._senders: dict[int, zmq.Socket[bytes]] = {}
        self._inbox: dict[tuple[int, int, int], Tensor] = {}
        """(rank, bucket, step) -> [bytes] uint8 that arrived and are not mixed yet."""
        self._accepted: set[tuple[int, int, int]] = set()
        """Those of them that were already handed to the bucket."""

    def depart(self, bucket: Bucket) -> None:
        view = self._begin_departure(bucket)
        if view is None:
            return
        self._flights[bucket.index] = Flight(bucket, self._step)
        body = memoryview(as_bytes(self._host.send_buffer(bucket, self._step)))
        header = HEADER.pack(self._token, self.rank, bucket.index, self._step, xxhash.xxh3_64_intdigest(body))
        for peer in view.neighbors:
            self._send(peer, [header, body])
            self.bytes_sent += len(body)

    def _send(self, peer: int, frames: list[bytes | memoryview]) -> None:
        """Sends to a peer. Blocking while the peer's queue is full; meanwhile receives. Raises PeerLost."""
        if peer not in self._senders:
            self._senders[peer] = self._sockets.sender(zmq.PUSH, self._endpoints[peer], 2 * len(self._buckets),
                                                   LINGER_MILLISECONDS)  # fmt: skip
        started = clock.now()
        while True:
            try:
                self._senders[peer].send_multipart(frames, zmq.NOBLOCK)  # copies: the snapshot may be overwritten
            except zmq.Again:
                self._receive(CHECK_SECONDS / 10)
                self._check_wait(peer, started, clock.now(), self._step, " (waiting for it to take the parameters)")
            else:
                return

    def _silence_hint(self, peer: int) -> str:
        return silence_hint(self._endpoints[self.rank], [self._endpoints[peer]])

    def _await(self, flight: Flight) -> None:
        self.collect(flight.bucket, flight, self.plan.view(flight.step).sources)

    def collect(self, bucket: Bucket, flight: Flight, sources: Sequence[int]) -> None:
        started = clock.now()
        for number, peer in enumerate(self.plan.view(flight.step).sources):  # buffers are numbered over all sources
            if peer not in sources:
                continue
            key = (peer, bucket.index, flight.step)
            while key not in self._inbox:
                if not self._receive(CHECK_SECONDS):
                    self._check_wait(peer, started, clock.now(), flight.step, " (waiting for its parameters)")
            if key not in self._accepted:
                self._accepted.add(key)
                self._host.accept(bucket, flight, number, peer, self._inbox[key])
        self.wait_seconds += clock.now() - started

    def release(self, bucket: Bucket) -> None:
        flight = self._flights[bucket.index]
        for peer in self.plan.view(flight.step).sources:
            self._inbox.pop((peer, bucket.index, flight.step), None)
            self._accepted.discard((peer, bucket.index, flight.step))
        super().release(bucket)

    def _receive(self, seconds: float) -> bool:
        """Receives one message, waiting at most so many seconds; returns whether one arrived."""
        if len(self._inbox) >= STEPS_AHEAD * len(self._buckets) * max(1, self.graph.num_nodes - 1):
            raise PeerLost(f"rank {self.rank}: other ranks send more than {STEPS_AHEAD} steps ahead")
        if not self._listener.poll(max(1, int(1000 * seconds))):
            return False
        frames = self._listener.recv_multipart(copy=False)
        if len(frames) == 2:
            self._store(frames[0].bytes, frames[1])
        return True

    def _store(self, header: bytes, body: zmq.Frame) -> None:
        """Stores a received snapshot; ignores anything else."""
        if len(header) != HEADER.size:
            return
        token, peer, number, step, digest = HEADER.unpack(header)
        known = token == self._token and peer < self.graph.num_nodes and number < len(self._buckets)
        if not known or len(body.buffer) not in self._sizes[number]:
            logger.warning("received something that is not a snapshot of this job, and ignored it")
            return
        if xxhash.xxh3_64_intdigest(body.buffer) != digest:
            raise PeerLost(f"rank {self.rank}: what rank {peer} sent in step {step} was damaged in transit", [peer])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory is not writable; it is only read
            found = torch.frombuffer(body.buffer, dtype=torch.uint8)
        self._inbox[peer, number, step] = found

    def finish_all(self, seconds: float) -> None:
        """Does nothing, because no operation here uses the buckets' memory."""

    def abandon(self) -> None:
        self._close(0)

    def end(self) -> bool:
        self._close(LINGER_MILLISECONDS)
        return False

    def _close(self, linger: int) -> None:
        for each in (*self._senders.values(), self._listener):
            each.close(linger)
        self._senders.clear()
        self._inbox.clear()
