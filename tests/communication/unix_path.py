"""A user-defined path: payloads over Unix sockets of one host, with one connection per ordered pair of neighbors.

The receiver sends a byte back once it has consumed a payload. A sender has at most AHEAD payloads in flight to a
neighbor, or those of two rounds, and drops payloads that a neighbor does not accept within the time-out. Nothing that
arrives is trusted: sizes are bounded by the schema.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping

import msgpack
import torch

from decentnode.communication.path import ALL_SENT, Path, PathContext, Sent, grouped
from decentnode.errors import AssemblyError, PeerFault
from decentnode.payload import Payload
from decentnode.tensors import as_bytes

AHEAD = 2
"""Most payloads in flight to a neighbor."""
HEAD = struct.Struct("<QII")
"""Round, phase, bytes of the msgpack list [elements of every tensor, scalars] that follows."""
MAX_LIST = 1 << 16
"""Most bytes of that list."""


class UnixSocketPath(Path):
    def __init__(self, context: PathContext) -> None:
        super().__init__(context)
        self._ahead = max(AHEAD, 2 * len(context.schemas))
        self._out: dict[int, socket.socket] = {}
        self._in_flight: dict[int, int] = {}
        """Payloads that each neighbor has not consumed yet."""
        self._opened: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:
        context = self.context
        if context.folder is None and peers:
            raise AssemblyError(f"node {context.uid} has no folder for Unix sockets", [context.uid])
        if peers:
            listener = self._socket(timeout_seconds)
            listener.bind(self._address(context.uid))
            listener.listen(len(peers))
        context.barrier("unix/listening", timeout_seconds)  # all nodes pass it, also those without such an edge
        for uid in sorted(peers):
            self._out[uid] = out = self._socket(timeout_seconds)
            out.connect(self._address(uid))
            out.sendall(context.uid.to_bytes(4, "little"))
        for _ in peers:
            connection, _ = listener.accept()
            connection.settimeout(timeout_seconds)
            self._opened.append(connection)
            source = int.from_bytes(_read(connection, 4), "little")
            if source not in peers:
                raise AssemblyError(f"node {context.uid} got a connection from {source}, no neighbor", [context.uid])
            connection.settimeout(None)
            self._threads.append(threading.Thread(target=self._receive, args=(connection, source), daemon=True))
            self._threads[-1].start()
        return peers

    def send(self, key: tuple[int, int], outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:
        deadline = time.monotonic() + self.context.state.patience(self.context.config.timeout_seconds)
        dropped = []
        for payload, uids in grouped(outgoing):
            tensors = list(payload.tensors.values())
            description = msgpack.packb([[tensor.numel() for tensor in tensors], dict(payload.scalars)])
            body = b"".join(as_bytes(tensor.cpu()) for tensor in tensors if tensor.numel())
            for uid in uids:
                message = HEAD.pack(*key, len(description)) + description + body
                if self._wait_for_room(uid, key[0], deadline) and self._send_all(uid, message):
                    self.context.counters.edge(uid).frames_sent += 1
                else:
                    dropped.append(uid)
        return Sent(dropped=dropped) if dropped else ALL_SENT

    def _wait_for_room(self, uid: int, round: int, deadline: float) -> bool:
        """Blocks while `_ahead` payloads are in flight. Returns whether another may be sent: False if the deadline
        passed, the members regroup, or the neighbor departed before this round. Raises if the run has failed."""
        state = self.context.state
        with state.waits_for([uid]):
            while True:
                state.raise_if_failed()
                if state.regrouping or state.departed.get(uid, round + 1) <= round:
                    return False
                has_room = self._in_flight.get(uid, 0) < self._ahead
                wait = 0.0 if has_room else min(0.1, max(0.0, deadline - time.monotonic()))
                if _is_readable(self._out[uid], wait):
                    num_consumed = len(self._out[uid].recv(self._ahead))
                    if not num_consumed:
                        return False
                    self._in_flight[uid] -= num_consumed
                elif has_room:
                    return True
                elif time.monotonic() >= deadline:
                    self.context.counters.fault("send_window", uid, f"round {round}")
                    return False

    def _send_all(self, uid: int, message: bytes) -> bool:
        """Returns whether the neighbor is still there."""
        try:
            self._out[uid].sendall(message)
        except OSError:  # the neighbor is gone
            return False
        self._in_flight[uid] = self._in_flight.get(uid, 0) + 1
        return True

    def _receive(self, connection: socket.socket, source: int) -> None:
        """Receives payloads from one neighbor, on its own thread. A fault ends the connection, because the start of the
        next payload is then unknown."""

        def report_consumed() -> None:
            with contextlib.suppress(OSError):
                connection.send(b".", socket.MSG_DONTWAIT)

        try:
            while True:
                round, phase, length = HEAD.unpack(_read(connection, HEAD.size))
                if phase >= len(self.context.schemas) or length > MAX_LIST:
                    raise PeerFault("malformed", f"phase {phase}, {length} bytes from {source}")
                totals, scalars = _unpack(_read(connection, length))
                plans = self.context.inbox.plans[phase]
                if len(totals) != len(plans) or not all(p.accepts(n) for p, n in zip(plans, totals, strict=True)):
                    raise PeerFault("wrong_shape", f"{totals} elements from {source}")
                tensors = {}
                for plan, total in zip(plans, totals, strict=True):
                    tensors[plan.name] = tensor = torch.empty(total, dtype=plan.spec.dtype)
                    _read_into(connection, as_bytes(tensor) if total else memoryview(b""))
                self.context.deliver((round, phase), source, tensors, scalars, report_consumed)
        except PeerFault as fault:
            self.context.refuse(fault)
        except (OSError, EOFError):
            pass  # the neighbor is gone: it said goodbye, or the waits for it end by their deadline
        finally:
            connection.close()

    def close(self, broken: bool) -> None:
        for connection in [*self._out.values(), *self._opened]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR if broken else socket.SHUT_WR)
        for thread in self._threads:
            thread.join(1.0)
        for connection in [*self._out.values(), *self._opened]:
            connection.close()
        self._out, self._opened, self._threads = {}, [], []

    def _address(self, uid: int) -> str:
        return f"{self.context.folder}/own-{self.context.generation[0]}-{uid}"

    def _socket(self, timeout_seconds: float) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX)
        opened.settimeout(timeout_seconds)
        self._opened.append(opened)
        return opened


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _unpack(description: bytes) -> tuple[list[int], dict[str, float]]:
    """Returns (elements of every tensor, scalars). Raises PeerFault if the bytes are anything else."""
    try:
        totals, scalars = msgpack.unpackb(description, max_array_len=1024, max_map_len=64, max_str_len=64)
    except (ValueError, msgpack.UnpackException) as error:
        raise PeerFault("malformed", str(error)) from None
    numbers = isinstance(scalars, dict) and all(isinstance(v, int | float) for v in scalars.values())
    if not numbers or not isinstance(totals, list) or not all(type(total) is int for total in totals):
        raise PeerFault("malformed", "no list of sizes and scalars")
    return totals, scalars


def _read(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    _read_into(connection, memoryview(buffer))
    return bytes(buffer)


def _read_into(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        num_read = connection.recv_into(buffer)
        if not num_read:
            raise EOFError
        buffer = buffer[num_read:]
