"""A TCP relay between two nodes that throttles, delays, cuts and corrupts what passes."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from types import TracebackType


class Relay:
    """Listens on a free port of 127.0.0.1 and passes connections on to `target`; used as a context manager."""

    def __init__(
        self, target: tuple[str, int], *, bytes_per_second: float = 0, delay_seconds: float = 0,
        cut_every_bytes: int = 0, cuts: int = 0, corrupt_every_bytes: int = 0, corruptions: int = 0, seed: int = 0,
        receive_buffer: int = 0,
    ) -> None:
        """cut_every_bytes: mean distance of cuts, which come at random bytes, at most `cuts` of them; corrupt_*: alike
        for single flipped bits. receive_buffer: bytes that it takes beyond what it has passed on, as a cable does.
        0 switches each off."""
        self.target = target
        self.bytes_per_second, self.delay_seconds = bytes_per_second, delay_seconds
        self.cut_count = self.corrupt_count = self.passed = 0
        self._random = random.Random(seed)
        self._cut_every, self._cuts = cut_every_bytes, cuts
        self._corrupt_every, self._corruptions = corrupt_every_bytes, corruptions
        self._lock = threading.Lock()
        self._next_cut, self._next_corrupt = self._draw(cut_every_bytes), self._draw(corrupt_every_bytes)
        self._open: set[socket.socket] = set()
        self._running = threading.Event()
        """Cleared while the relay is paused."""
        self._running.set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        if receive_buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.port: int = self._listener.getsockname()[1]

    def _draw(self, every: int) -> int:
        return self._random.randrange(1, 2 * every) if every else 1 << 62

    def __enter__(self) -> Relay:
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
        """Let nothing through until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def cut(self) -> None:
        """Break every connection now."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    each.shutdown(socket.SHUT_RDWR)
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
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._running.wait()
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                if self.bytes_per_second:
                    time.sleep(len(data) / self.bytes_per_second)
                whole, out = len(data), self._spoil(data)
                sink.sendall(out)
                if len(out) < whole:
                    break
        except OSError:
            pass
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open.discard(each)
            each.close()

    def _spoil(self, data: bytes) -> bytes:
        """What comes out of the relay: shorter when the connection is to be cut there."""
        with self._lock:
            start, self.passed = self.passed, self.passed + len(data)
            while self._next_corrupt < self.passed:
                at = self._next_corrupt - start
                if self.corrupt_count < self._corruptions and at >= 0:
                    changed = bytearray(data)
                    changed[at] ^= 1 << self._random.randrange(8)
                    data = bytes(changed)
                    self.corrupt_count += 1
                self._next_corrupt += self._draw(self._corrupt_every)
            if self._next_cut < self.passed and self.cut_count < self._cuts:
                self.cut_count += 1
                at = max(0, self._next_cut - start)
                self._next_cut = self.passed + self._draw(self._cut_every)
                return data[:at]
            return data
