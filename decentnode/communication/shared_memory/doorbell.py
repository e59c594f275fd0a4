"""Doorbells between nodes of one host: datagrams straight from one training thread to another, without a detour through
the I/O threads. What does not fit into the socket's short queue goes over ZeroMQ instead."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from decentnode import clock
from decentnode.wire.doorbell import MAX_BYTES

_TIMEVAL = struct.Struct("@ll")
_MIN_TIMEOUT_SECONDS = 1e-6
"""Smallest time-out that is set on the socket: zero would mean no time-out."""


class DatagramDoorbell:
    """A doorbell on a Unix datagram socket in the run's private folder."""

    def __init__(self, folder: Path, uid: int, on_datagram: Callable[[bytes], None]) -> None:
        """on_datagram runs on the listening thread."""
        self._folder = folder
        self._on_datagram = on_datagram
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        """Receiving blocks for as long as SO_RCVTIMEO says, which takes one system call per datagram."""
        self._receive_timeout = -1.0
        """The time-out that SO_RCVTIMEO was last set to; at first, receiving blocks without limit."""
        self._paths: dict[int, str] = {}
        self._own_path = self._path(uid)
        Path(self._own_path).unlink(missing_ok=True)  # left behind by a process that was killed
        self._socket.bind(self._own_path)
        self._listener = 0
        self._is_rung = False

    def _path(self, uid: int) -> str:
        found = self._paths.get(uid)
        if found is None:
            found = self._paths[uid] = str(self._folder / f"{uid}d")
        return found

    def ring(self) -> None:
        """Makes `listen` return. Any thread, including the listening one."""
        self._is_rung = True
        if threading.get_ident() != self._listener:  # the listener itself is awake while it processes datagrams
            self._send(b"", self._own_path)

    def send(self, uid: int, datagram: bytes) -> bool:
        """Sends a datagram to a neighbor. Returns whether the neighbor's queue took it. Does not block."""
        return self._send(datagram, self._path(uid))

    def _send(self, datagram: bytes, path: str) -> bool:
        try:
            self._socket.sendto(datagram, socket.MSG_DONTWAIT, path)
        except (BlockingIOError, OSError):
            return False
        return True

    def listen(self, timeout_seconds: float) -> None:
        """Blocks until rung or until the time-out, and processes datagrams meanwhile; a datagram may prolong it to at
        most twice the time-out. With a time-out of 0, processes at most one pending datagram. Only one thread may
        listen."""
        self._listener = threading.get_ident()
        flags = 0 if timeout_seconds > 0 else socket.MSG_DONTWAIT  # even the least time-out lasts a tick of the kernel
        if timeout_seconds != self._receive_timeout and not flags:
            self._receive_timeout = timeout_seconds
            micros = int(1e6 * max(timeout_seconds, _MIN_TIMEOUT_SECONDS))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
        receive, deadline = self._socket.recv, clock.now() + timeout_seconds
        with contextlib.suppress(BlockingIOError):  # timed out
            while not self._is_rung:
                datagram = receive(MAX_BYTES, flags)
                if not datagram:
                    break
                self._on_datagram(datagram)
                if clock.now() >= deadline:
                    break
        self._is_rung = False

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def take_in(self) -> None:
        """Processes all pending datagrams, on the listening thread or if no thread listens. Does not block."""
        with contextlib.suppress(BlockingIOError):
            while datagram := self._socket.recv(MAX_BYTES, socket.MSG_DONTWAIT):
                self._on_datagram(datagram)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            Path(self._own_path).unlink()
