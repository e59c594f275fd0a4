"""Signal handling of the supervisor and its children. `StopSignals` collects signals and makes a pipe readable, so that
a loop can wait for them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SUSPENDING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""The signals by which a terminal stops processes: on Ctrl-Z, and when a background process reads or writes."""

SUPERVISOR_SIGNALS = (*STOPPING, *SUSPENDING)
"""Signals that a terminal, a scheduler or `kill` may send to all processes of a run at once; only the supervisor obeys
them."""


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals of SUPERVISOR_SIGNALS in this thread during a block; they are delivered after it, or to
    another thread. Processes that the thread starts in the block begin with these signals blocked and must call
    `ignore_signals` or `keep_sigterm`."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def ignore_signals() -> None:
    """Ignores the signals of SUPERVISOR_SIGNALS from now on, including those that arrived while they were blocked. Main
    thread only."""
    for number in SUPERVISOR_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISOR_SIGNALS)


_kept_signals: list[int] = []


def keep_sigterm() -> None:
    """Keeps a SIGTERM until `on_termination` is called or `StopSignals` is entered, in a process that cannot end
    regularly yet. Main thread only."""
    _keep(signal.SIGTERM)


def _keep(number: int) -> Any:
    return signal.signal(number, lambda number, _: _kept_signals.append(number))


def keep_stop_signals() -> dict[int, Any]:
    """Keeps SIGINT, SIGTERM and SIGHUP until `StopSignals` is entered; after it they do not end this process, which
    prints the outcome then. Returns the previous handlers. Main thread only."""
    return {number: _keep(number) for number in STOPPING if is_obeyed(number)}


@contextlib.contextmanager
def ended_by_signals(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Context manager that one of the signals of `keep_stop_signals` ends, without an error; then `handlers`, which
    that function returned, are in force again. Main thread only."""
    with contextlib.suppress(KeyboardInterrupt):
        for number in handlers:
            signal.signal(number, signal.default_int_handler)
        yield
    _kept_signals.clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def is_obeyed(number: int) -> bool:
    """Returns whether a run obeys a signal: SIGINT always, others unless the caller ignores them (nohup)."""
    return number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN


def on_termination(ask: Callable[[], object]) -> None:
    """Calls `ask` on SIGTERM from now on, and at once if one was kept by `keep_sigterm`. Main thread only."""
    signal.signal(signal.SIGTERM, lambda *_: ask())
    if _kept_signals:
        _kept_signals.clear()
        ask()


class StopSignals:
    """Context manager in which SIGINT, SIGTERM and SIGHUP are only added to `received`, and SIGTSTP only sets
    `suspend`. Does nothing outside the main thread.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.suspend = False
        """Whether the terminal asked this process to suspend itself (Ctrl-Z), and it has not done so yet."""
        self._previous_handlers: dict[int, object] = {}
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Returns a file descriptor that is readable after a signal until `clear` is called."""
        return self._read

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if is_obeyed(number):
                    self._previous_handlers[number] = signal.signal(number, self._on_signal)
            if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
                self._previous_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_suspend)
            while _kept_signals:
                self._on_signal(_kept_signals.pop(), None)
        return self

    def _on_suspend(self, _: int, __: FrameType | None) -> None:
        self.suspend = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")

    def suspend_if_asked(self, tell: Callable[[], None]) -> bool:
        """Suspends this process if the terminal asked for it. Blocking until the shell resumes it (`fg`, `bg`). Returns
        whether it was suspended. tell: called before the suspension."""
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
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._read)
        os.close(self._write)

    @property
    def exit_code(self) -> int:
        """128 + the first signal: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.received[0]
