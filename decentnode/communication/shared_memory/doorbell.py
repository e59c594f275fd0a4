"""Doorbells between nodes of one host: datagrams from one training thread straight to another, without a detour
through the I/O threads. What does not fit the socket's short queue goes over ZeroMQ instead."""

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
_LEAST_SECONDS = 1e-6
"""A socket's time-out of zero would be none at all."""


class DatagramDoorbell:
    """A Unix datagram socket in the run's private folder."""

    def __init__(self, folder: Path, uid: int, on_datagram: Callable[[bytes], None]) -> None:
        """on_datagram runs on the listening thread."""
        self._folder = folder
        self._on_datagram = on_datagram
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        """Blocks when received from, for as long as SO_RCVTIMEO says: one call of the system for each datagram."""
        self._patience = -1.0
        """What SO_RCVTIMEO was set for last; at first a socket waits for ever."""
        self._paths: dict[int, str] = {}
        self._own = self._path(uid)
        Path(self._own).unlink(missing_ok=True)  # of a process that was killed
        self._socket.bind(self._own)
        self._listener = 0
        self._rung = False

    def _path(self, uid: int) -> str:
        found = self._paths.get(uid)
        if found is None:
            found = self._paths[uid] = str(self._folder / f"{uid}d")
        return found

    def ring(self) -> None:
        """Any thread, the listening one too: `listen` returns."""
        self._rung = True
        if threading.get_ident() != self._listener:  # which is awake while it takes things in
            self._send(b"", self._own)

    def send(self, uid: int, datagram: bytes) -> bool:
        """Whether the neighbor's queue took it; not blocking."""
        return self._send(datagram, self._path(uid))

    def _send(self, datagram: bytes, path: str) -> bool:
        try:
            self._socket.sendto(datagram, socket.MSG_DONTWAIT, path)
        except (BlockingIOError, OSError):
            return False
        return True

    def listen(self, timeout_seconds: float) -> None:
        """Blocking: take in what comes until rung; without patience, one datagram of those that are there. A single
        thread listens."""
        self._listener = threading.get_ident()
        flags = 0 if timeout_seconds > 0 else socket.MSG_DONTWAIT  # the least time-out lasts until a tick of the kernel
        if timeout_seconds != self._patience and not flags:
            self._patience = timeout_seconds
            micros = int(1e6 * max(timeout_seconds, _LEAST_SECONDS))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
        receive, deadline = self._socket.recv, clock.now() + timeout_seconds
        with contextlib.suppress(BlockingIOError):  # the time is over
            while not self._rung:
                datagram = receive(MAX_BYTES, flags)
                if not datagram:
                    break
                self._on_datagram(datagram)
                if clock.now() >= deadline:
                    break
        self._rung = False

    @property
    def descriptor(self) -> int:
        """Of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def take_in(self) -> None:
        """Not blocking: take in all that is there, on the thread that listens, or where none does."""
        with contextlib.suppress(BlockingIOError):
            while datagram := self._socket.recv(MAX_BYTES, socket.MSG_DONTWAIT):
                self._on_datagram(datagram)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            Path(self._own).unlink()
