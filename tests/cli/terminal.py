"""A pseudo terminal of its own for a command, as a person has it: keys, Ctrl-S, Ctrl-C, Ctrl-Z."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SECONDS = 200.0
HOLD, GO_ON, INTERRUPT, SUSPEND = b"\x13", b"\x11", b"\x03", b"\x1a"


class Terminal:
    """Keys go to `press`; what the command prints is taken only in `read_until` and `rest`."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master, self.process = master, process
        self.seen = ""

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + SECONDS
        while text not in self.seen:
            assert self._take(deadline - time.monotonic()), f"{text!r} never came:\n{self.seen}"

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
def in_terminal(command: Sequence[str], folder: Path, environ: dict[str, str]) -> Iterator[Terminal]:
    """The command as the foreground job of a new terminal; killed with all its children at the end."""
    master, slave = pty.openpty()

    def take_over() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for number in (signal.SIGINT, signal.SIGQUIT):  # as a shell does; jobs in the background, such as a run of the
            signal.signal(number, signal.SIG_DFL)  # tests, have them ignored, and children inherit that

    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=take_over,
    )  # fmt: skip
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
        os.close(master)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {SECONDS:g} s"
        time.sleep(0.02)
