"""Doorbells between nodes of one host: datagrams from one training thread straight to another, without a detour
through the I/O threads. What does not fit the socket's short queue goes over ZeroMQ instead."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

MAX_DATAGRAM = 4096


class DatagramBell:
    """A Unix datagram socket in the run's private folder."""

    def __init__(self, folder: Path, uid: int, on_datagram: Callable[[bytes], None]) -> None:
        """on_datagram runs on the listening thread."""
        self._folder = folder
        self._on_datagram = on_datagram
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._paths: dict[int, str] = {}
        self._own = self._path(uid)
        Path(self._own).unlink(missing_ok=True)  # of a process that was killed
        self._socket.bind(self._own)
        self._listener = 0
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def _path(self, uid: int) -> str:
        found = self._paths.get(uid)
        if found is None:
            found = self._paths[uid] = str(self._folder / f"{uid}d")
        return found

    def ring(self) -> None:
        """Any thread but the listening one, which is awake while it takes things in."""
        if threading.get_ident() != self._listener:
            self._send(b"", self._own)

    def send(self, uid: int, datagram: bytes) -> bool:
        """Whether the neighbor's queue took it; not blocking."""
        return self._send(datagram, self._path(uid))

    def _send(self, datagram: bytes, path: str) -> bool:
        try:
            self._socket.sendto(datagram, path)
        except (BlockingIOError, OSError):
            return False
        return True

    def listen(self, timeout_seconds: float) -> None:
        self._listener = threading.get_ident()
        if self._poll.poll(1000 * timeout_seconds):
            self.drain()

    def drain(self) -> None:
        """Take in everything that lies there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._socket.recv(MAX_DATAGRAM)
                if datagram:
                    self._on_datagram(datagram)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            Path(self._own).unlink()
