"""A pseudo terminal for a command, in which tests press keys as a person does: Ctrl-S, Ctrl-Q, Ctrl-C, Ctrl-Z."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests import conftest
from tests.commands import Command, started

SECONDS = 200.0
HOLD, RESUME, INTERRUPT, SUSPEND = b"\x13", b"\x11", b"\x03", b"\x1a"


class Terminal:
    """A terminal in which a command runs. Only `read_until` and `read_rest` read its output."""

    def __init__(self, master: int, process: Command) -> None:
        self._master, self.process = master, process
        self.seen = ""

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def read_until(self, pattern: str) -> None:
        """Reads until the output has a match of the regular expression `pattern`. A line that is redrawn twice a second
        need not show every number that it counts through, so that its pattern has to match later ones too."""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, self.seen):
            assert self._take(deadline - time.monotonic()), f"{pattern!r} was never printed:\n{self.seen}"

    def read_rest(self) -> str:
        """Waits for the end of the command and returns everything that it printed."""
        deadline = time.monotonic() + SECONDS
        while self._take(deadline - time.monotonic()):
            pass
        self.process.wait(SECONDS)
        return self.seen

    def _take(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, seconds))[0]:
            return False
        with contextlib.suppress(OSError):  # EIO: the command has closed its end
            data = os.read(self._master, 65536)
            self.seen += data.decode(errors="replace")
            return bool(data)
        return False


@contextlib.contextmanager
def in_terminal(words: Sequence[str], folder: Path, environ: dict[str, str]) -> Iterator[Terminal]:
    """Runs `python -m decentnode WORDS` as the foreground job of a new terminal; at the end it is killed with all its
    children."""
    master, slave = pty.openpty()
    try:
        with started(folder, *words, environ=environ, terminal=slave) as command:
            os.close(slave)
            yield Terminal(master, command)
    finally:
        os.close(master)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls until `condition` holds, for as long as a whole run may take on a busy machine. what: the awaited event."""
    conftest.wait_until(condition, f"waited {SECONDS:g} s for {what}", SECONDS)
