"""A pseudo terminal of its own for a command, as a person has it: keys, Ctrl-S, Ctrl-C, Ctrl-Z."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.commands import Command, started

SECONDS = 200.0
HOLD, GO_ON, INTERRUPT, SUSPEND = b"\x13", b"\x11", b"\x03", b"\x1a"


class Terminal:
    """Keys go to `press`; what the command prints is taken only in `read_until` and `rest`."""

    def __init__(self, master: int, process: Command) -> None:
        self._master, self.process = master, process
        self.seen = ""

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def read_until(self, pattern: str) -> None:
        """Until what was printed has a match of the regular expression `pattern`. A line that is drawn anew twice a
        second need not show every number that it counts through: its pattern has to take later ones too."""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, self.seen):
            assert self._take(deadline - time.monotonic()), f"{pattern!r} never came:\n{self.seen}"

    def rest(self) -> str:
        """All that is printed until the command ends."""
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
    """`python -m decentnode WORDS` as the foreground job of a new terminal; killed with all its children at the end."""
    master, slave = pty.openpty()
    try:
        with started(folder, *words, environ=environ, terminal=slave) as command:
            os.close(slave)
            yield Terminal(master, command)
    finally:
        os.close(master)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {SECONDS:g} s"
        time.sleep(0.02)
