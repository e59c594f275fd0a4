"""Writes text to a terminal, pipe or file that may block, in a thread of its own.

A terminal held with Ctrl-S, a pager or a full pipe blocks its writer, and a closed one raises. Neither affects the
caller here, which supervises a run: progress is dropped, other text is queued in order, and errors go to a second
stream if the first is closed.
"""

from __future__ import annotations

import contextlib
import enum
import io
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from typing import TextIO

PROGRESS_CHARACTERS = 1 << 16
"""While more characters than this are queued, progress is dropped."""
KEPT_CHARACTERS = 1 << 20
"""While more characters than this are queued, everything except errors and results is dropped."""


class OutputKind(enum.Enum):
    """The kind of a text, which determines whether it is dropped when it cannot be written at once."""

    PROGRESS = enum.auto()
    """Dropped while more than PROGRESS_CHARACTERS are queued."""
    LINE = enum.auto()
    """Dropped while more than KEPT_CHARACTERS are queued."""
    RESULT = enum.auto()
    """Always kept."""
    ERROR = enum.auto()
    """Always kept, and written to the second stream if the first is closed."""


class Output(io.TextIOBase):
    """A text file whose `write` never blocks and never raises. Any thread may write."""

    def __init__(self, stream: TextIO, instead: TextIO | None = None) -> None:
        """instead: the stream for errors if `stream` is closed, unless both are the same file."""
        self._stream, self._error_stream = stream, instead
        self._descriptor_number = _descriptor(stream)
        self._is_broken = self._is_closed = False
        self._kind = OutputKind.LINE
        self._queue: deque[tuple[str, OutputKind]] = deque()
        self._characters = 0
        """Characters in the queue and in the text that is being written."""
        self._dropped_lines = 0
        """Lines dropped since the last text was queued."""
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="output", daemon=True).start()

    # -- the caller's side ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, kind: OutputKind) -> Iterator[None]:
        """Assigns this kind to all text that `write` gets within the block. For one thread at a time."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def write(self, text: str) -> int:
        self.put(text, self._kind)
        return len(text)

    def put(self, text: str, kind: OutputKind) -> None:
        """Queues a text. Does not block; any thread may call it."""
        most = {OutputKind.PROGRESS: PROGRESS_CHARACTERS, OutputKind.LINE: KEPT_CHARACTERS}.get(kind)
        with self._changed:
            if most is not None and self._characters > most:
                self._dropped_lines += text.count("\n")
                return
            if self._dropped_lines:
                note = f"... {self._dropped_lines} lines were left out because the output was blocked\n"
                self._append(note, OutputKind.LINE)
                self._dropped_lines = 0
            self._append(text, kind)
            self._changed.notify_all()

    def _append(self, text: str, kind: OutputKind) -> None:
        self._queue.append((text, kind))
        self._characters += len(text)

    @property
    def behind(self) -> bool:
        """Whether some text is not written yet."""
        return self._characters > 0

    @property
    def foreground(self) -> bool:
        """Returns False if the stream is a terminal and this process is not in its foreground."""
        try:
            return self._descriptor_number is None or os.tcgetpgrp(self._descriptor_number) == os.getpgrp()
        except OSError:  # not a terminal
            return True

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Waits until all text is written or the stream is closed, for at most `timeout_seconds` (None: without limit).
        Returns whether all text was handled in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._characters, timeout_seconds)

    def close(self, timeout_seconds: float = 0.0) -> None:
        """Ends the thread once all text is written; later text is lost. Blocks for at most `timeout_seconds`."""
        self.drain(timeout_seconds)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def flush(self) -> None:
        """Does nothing: the thread writes all text as soon as it can."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    # -- the thread -------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                text, kind = self._queue.popleft()
            self._write_one(text, kind)
            with self._changed:
                self._characters -= len(text)
                self._changed.notify_all()

    def _write_one(self, text: str, kind: OutputKind) -> None:
        if not self._is_broken:
            try:
                self._write_to(self._stream, text)
                return
            except (OSError, ValueError):  # closed: the reader of the pipe ended, or the terminal is gone
                self._is_broken = True
        if kind is OutputKind.ERROR and self._error_stream is not None and not _same(self._stream, self._error_stream):
            with contextlib.suppress(OSError, ValueError):
                self._write_to(self._error_stream, text)

    def _write_to(self, stream: TextIO, text: str) -> None:
        """Writes a text; blocking. It uses the descriptor, not the stream: if the thread hung inside the stream's lock
        while the interpreter ends, Python would abort with a fatal error."""
        number = _descriptor(stream)
        if number is None:
            stream.write(text)
            stream.flush()
            return
        data = memoryview(text.encode(self.encoding, "replace"))
        while data:
            try:
                data = data[os.write(number, data) :]
            except BlockingIOError:  # another program made the terminal non-blocking
                poll = select.poll()
                poll.register(number, select.POLLOUT)
                poll.poll()


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _same(one: TextIO, other: TextIO) -> bool:
    numbers = _descriptor(one), _descriptor(other)
    if numbers[0] is None or numbers[1] is None:
        return one is other
    try:
        return os.path.sameopenfile(numbers[0], numbers[1])
    except OSError:
        return False
