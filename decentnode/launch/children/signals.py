"""Signals that a loop can wait for: a pipe becomes readable when one comes, and they are counted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SUSPENDING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""The signals by which a terminal stops processes: on Ctrl-Z, and when a background process reads or writes."""

OF_THE_SUPERVISOR = (*STOPPING, *SUSPENDING)
"""What a terminal, a scheduler or `kill` may send to all processes of a run at once; the supervisor alone obeys."""


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Signals of OF_THE_SUPERVISOR that come in this block are delivered after it, or to another thread. Processes that
    this thread starts in it begin with these signals blocked: they are to call `ignore`, or `note_termination`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_SUPERVISOR)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Main thread: signals of OF_THE_SUPERVISOR do nothing from now on, those that came while they were blocked
    included."""
    for number in OF_THE_SUPERVISOR:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_SUPERVISOR)


_noted: list[int] = []


def note_termination() -> None:
    """Main thread of a process that cannot end in order yet: SIGTERM is kept until `on_termination`, or for
    `StopSignals`."""
    signal.signal(signal.SIGTERM, lambda number, _: _noted.append(number))


def on_termination(ask: Callable[[], object]) -> None:
    """Main thread: SIGTERM calls `ask` from now on, at once where one was kept."""
    signal.signal(signal.SIGTERM, lambda *_: ask())
    if _noted:
        _noted.clear()
        ask()


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP only fill `received`, and SIGTSTP sets `suspend`.

    Does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.suspend = False
        """Whether the terminal asked this process to suspend itself (Ctrl-Z), and it has not yet."""
        self._before: dict[int, object] = {}
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """A file descriptor that is readable from a signal until `clear`."""
        return self._read

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                    self._before[number] = signal.signal(number, self._on_signal)
            if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_suspend)
            while _noted:
                self._on_signal(_noted.pop(), None)
        return self

    def _on_suspend(self, _: int, __: FrameType | None) -> None:
        self.suspend = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")

    def suspend_if_asked(self, tell: Callable[[], None]) -> bool:
        """Suspend this process if the terminal asked for it. Blocking until the shell lets it go on (`fg`, `bg`).
        Returns whether it was suspended. tell: called before."""
        if not self.suspend:
            return False
        self.suspend = False
        tell()
        os.kill(os.getpid(), signal.SIGSTOP)
        return True

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
