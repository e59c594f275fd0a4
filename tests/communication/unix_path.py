"""A path of one's own: payloads over Unix sockets of one host, one connection for every ordered pair of neighbors.

The receiver sends a byte back once a payload is used up; a sender has AHEAD payloads under way to a neighbor, or those
of two rounds, and drops what a neighbor does not take within the time-out. Nothing that comes is trusted: sizes are
bounded by the schema.
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
HEAD = struct.Struct("<QII")
"""Round, phase, bytes of the msgpack list [elements of every tensor, scalars] that follows."""
MAX_LIST = 1 << 16


class UnixSocketPath(Path):
    def __init__(self, context: PathContext) -> None:
        super().__init__(context)
        self._ahead = max(AHEAD, 2 * len(context.schemas))
        self._out: dict[int, socket.socket] = {}
        self._under_way: dict[int, int] = {}
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
        context.barrier("unix/listening", timeout_seconds)  # nodes without such an edge pass it, too
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
            words = msgpack.packb([[tensor.numel() for tensor in tensors], dict(payload.scalars)])
            body = b"".join(as_bytes(tensor.cpu()) for tensor in tensors if tensor.numel())
            for uid in uids:
                message = HEAD.pack(*key, len(words)) + words + body
                if self._has_room(uid, key[0], deadline) and self._sent(uid, message):
                    self.context.counters.edge(uid).frames_sent += 1
                else:
                    dropped.append(uid)
        return Sent(dropped=dropped) if dropped else ALL_SENT

    def _has_room(self, uid: int, round: int, deadline: float) -> bool:
        """Blocking while `_ahead` payloads are under way; what every wait does: notice the end of run and neighbor."""
        state = self.context.state
        with state.waits_for([uid]):
            while True:
                state.raise_if_failed()
                if state.regrouping or state.departed.get(uid, round + 1) <= round:
                    return False
                has_room = self._under_way.get(uid, 0) < self._ahead
                wait = 0.0 if has_room else min(0.1, max(0.0, deadline - time.monotonic()))
                if _answered(self._out[uid], wait):
                    used_up = len(self._out[uid].recv(self._ahead))
                    if not used_up:
                        return False
                    self._under_way[uid] -= used_up
                elif has_room:
                    return True
                elif time.monotonic() >= deadline:
                    self.context.counters.fault("send_window", uid, f"round {round}")
                    return False

    def _sent(self, uid: int, message: bytes) -> bool:
        try:
            self._out[uid].sendall(message)
        except OSError:  # the neighbor is gone
            return False
        self._under_way[uid] = self._under_way.get(uid, 0) + 1
        return True

    def _receive(self, connection: socket.socket, source: int) -> None:
        """A thread of its own for every neighbor. A fault ends the connection: what follows cannot be told apart."""

        def used_up() -> None:
            with contextlib.suppress(OSError):
                connection.send(b".", socket.MSG_DONTWAIT)

        try:
            while True:
                round, phase, length = HEAD.unpack(_read(connection, HEAD.size))
                if phase >= len(self.context.schemas) or length > MAX_LIST:
                    raise PeerFault("malformed", f"phase {phase}, {length} bytes from {source}")
                totals, scalars = _unpacked(_read(connection, length))
                plans = self.context.inbox.plans[phase]
                if len(totals) != len(plans) or not all(p.accepts(n) for p, n in zip(plans, totals, strict=True)):
                    raise PeerFault("wrong_shape", f"{totals} elements from {source}")
                tensors = {}
                for plan, total in zip(plans, totals, strict=True):
                    tensors[plan.name] = tensor = torch.empty(total, dtype=plan.spec.dtype)
                    _read_into(connection, as_bytes(tensor) if total else memoryview(b""))
                self.context.deliver((round, phase), source, tensors, scalars, used_up)
        except PeerFault as fault:
            self.context.refuse(fault)
        except (OSError, EOFError):
            pass  # the neighbor is gone: its rounds run into their deadline, or it said goodbye
        finally:
            connection.close()

    def close(self, broken: bool) -> None:
        for each in [*self._out.values(), *self._opened]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR if broken else socket.SHUT_WR)
        for thread in self._threads:
            thread.join(1.0)
        for each in [*self._out.values(), *self._opened]:
            each.close()
        self._out, self._opened, self._threads = {}, [], []

    def _address(self, uid: int) -> str:
        return f"{self.context.folder}/own-{self.context.generation[0]}-{uid}"

    def _socket(self, timeout_seconds: float) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(timeout_seconds)
        self._opened.append(made)
        return made


def _answered(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _unpacked(words: bytes) -> tuple[list[int], dict[str, float]]:
    """Raises PeerFault."""
    try:
        totals, scalars = msgpack.unpackb(words, max_array_len=1024, max_map_len=64, max_str_len=64)
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
        got = connection.recv_into(buffer)
        if not got:
            raise EOFError
        buffer = buffer[got:]
