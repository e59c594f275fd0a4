"""A TCP proxy between two nodes that throttles, delays, cuts and corrupts their connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from types import TracebackType


class FaultyProxy:
    """A context manager that listens on a free port of 127.0.0.1 and forwards connections to `target`."""

    def __init__(
        self, target: tuple[str, int], *, bytes_per_second: float = 0, delay_seconds: float = 0,
        cut_every_bytes: int = 0, cuts: int = 0, corrupt_every_bytes: int = 0, corruptions: int = 0, seed: int = 0,
        receive_buffer: int = 0,
    ) -> None:
        """cut_every_bytes: mean number of bytes between cuts, which happen at random bytes, `cuts` times at most.
        corrupt_every_bytes, corruptions: the same for single flipped bits. receive_buffer: how many bytes the proxy
        accepts beyond those that it has forwarded, like a cable. 0 switches each off."""
        self.target = target
        self.bytes_per_second, self.delay_seconds = bytes_per_second, delay_seconds
        self.cut_count = self.corrupt_count = self._num_forwarded = 0
        self._random = random.Random(seed)
        self._cut_every, self._cuts = cut_every_bytes, cuts
        self._corrupt_every, self._corruptions = corrupt_every_bytes, corruptions
        self._lock = threading.Lock()
        self._next_cut = self._draw_distance(cut_every_bytes)
        self._next_corrupt = self._draw_distance(corrupt_every_bytes)
        """Counts of forwarded bytes at which the next cut and the next flipped bit happen."""
        self._open: set[socket.socket] = set()
        self._running = threading.Event()
        """Cleared while the proxy is paused."""
        self._running.set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        if receive_buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.port: int = self._listener.getsockname()[1]

    def _draw_distance(self, every: int) -> int:
        return self._random.randrange(1, 2 * every) if every else 1 << 62

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._running.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def pause(self) -> None:
        """Forwards nothing until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def cut(self) -> None:
        """Breaks every open connection."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                if self._closed:
                    return
                near.close()
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._running.wait()
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                if self.bytes_per_second:
                    time.sleep(len(data) / self.bytes_per_second)
                forwarded = self._apply_faults(data)
                sink.sendall(forwarded)
                if len(forwarded) < len(data):
                    break
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open.discard(end)
            end.close()

    def _apply_faults(self, data: bytes) -> bytes:
        """Returns the bytes to forward: with flipped bits, and shorter than `data` if the connection is to be cut."""
        with self._lock:
            start, self._num_forwarded = self._num_forwarded, self._num_forwarded + len(data)
            while self._next_corrupt < self._num_forwarded:
                index = self._next_corrupt - start
                if self.corrupt_count < self._corruptions and index >= 0:
                    changed = bytearray(data)
                    changed[index] ^= 1 << self._random.randrange(8)
                    data = bytes(changed)
                    self.corrupt_count += 1
                self._next_corrupt += self._draw_distance(self._corrupt_every)
            if self._next_cut < self._num_forwarded and self.cut_count < self._cuts:
                self.cut_count += 1
                index = max(0, self._next_cut - start)
                self._next_cut = self._num_forwarded + self._draw_distance(self._cut_every)
                return data[:index]
            return data
