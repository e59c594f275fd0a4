"""Signals as something to wait for: a pipe that becomes readable, and a count of what came."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP only fill `received`. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, object] = {}
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Readable after a signal, until `clear`."""
        return self._read

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._read)
        os.close(self._write)

    @property
    def exit_code(self) -> int:
        """128 + the first signal: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.received[0]
