"""Runs each tracker in its own process: starts it with the run, passes on its messages, and waits a while for it at the
end.

A tracker's library may raise, hang, print, start processes or end its own: none of that affects the run. The tracker
reads its data from the nodes' files, so that nothing is queued for it in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from decentnode import clock

CLOSE_SECONDS = 30.0
"""How long trackers may take after the end of the run to send the rest of the data."""
TICK_SECONDS = 0.5
"""Least time between two checks of the trackers."""
MAX_LINES = 20
"""How many lines of one tracker are shown to the user; later ones are not."""
MAX_BYTES = 1 << 16
"""How many bytes are read from a tracker at a time."""


class _Tracker:
    """One tracker's process."""

    def __init__(self, section: dict[str, Any], run: Path, machine: int, experiment_dir: Path) -> None:
        """Starts the process. Raises OSError."""
        self.name = str(section["name"])
        self.log = run / "trackers" / f"{self.name.replace(':', '.')}.log"
        self.ended = False
        self.failed = False
        """Whether the user was already told why the tracker ended."""
        self._lines_shown = 0
        self._text = b""
        self.log.parent.mkdir(exist_ok=True)
        self._status, status = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(status, True)
        try:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "decentnode.trackers.process", str(run), json.dumps(section),
                     "--machine", str(machine), "--status", str(status), "--beside", str(experiment_dir)],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(status,),
                    start_new_session=True,  # Ctrl-C goes only to the run, which then ends the tracker regularly
                )  # fmt: skip
        except OSError:
            os.close(self._status)
            raise
        finally:
            os.close(status)

    def listen(self) -> Iterator[str]:
        """Yields messages for the user that the tracker has sent. Does not wait."""
        if self.ended:
            return
        gone = self.process.poll() is not None
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._status, MAX_BYTES)
        *lines, self._text = self._text.split(b"\n")
        self._text = self._text[-MAX_BYTES:]
        for line in lines:
            yield from self._messages_of(line.decode(errors="replace"))
        if gone:
            self.ended = True
            os.close(self._status)
            if self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
            if self.process.returncode and not self.failed:
                yield f"tracker {self.name} ended with exit code {self.process.returncode}: see {self.log}"

    def _messages_of(self, line: str) -> Iterator[str]:
        self._lines_shown += 1
        if line.startswith("! "):
            self.failed = True
            yield f"tracker {self.name} {line[2:]}; the run continues without it, its log is {self.log}"
        elif self._lines_shown <= MAX_LINES:
            yield f"tracker {self.name}: {line[2:]}" if line.startswith("= ") else f"tracker {self.name} {line}"

    def close_input(self) -> None:
        """Tells the tracker that the run is over, by closing its standard input."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        """Kills the tracker with all processes of its session, and reaps it."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Trackers:
    """All trackers of a run on this machine. Not thread-safe; no method raises."""

    def __init__(
        self, sections: Sequence[dict[str, Any]], run: Path | None, machine: int, experiment_dir: Path,
        notice: Callable[[str], None],
    ) -> None:
        """Starts the trackers' processes. run: the run folder; None for a dry run, which is not tracked.
        experiment_dir: the folder of the experiment's file, from which the user's own modules can be imported. notice:
        shows a text to the user."""
        self._notice = notice
        self._trackers: list[_Tracker] = []
        self._ticked = clock.now()
        for section in sections if run is not None else ():
            assert run is not None
            try:
                self._trackers.append(_Tracker(section, run, machine, experiment_dir))
            except OSError as error:
                notice(f"tracker {section['name']} could not be started: {error.strerror}")

    def tick(self) -> None:
        """Passes on messages of trackers. Does not wait; to be called often."""
        if self._trackers and clock.now() - self._ticked >= TICK_SECONDS:
            self._ticked = clock.now()
            self._listen()

    def _listen(self) -> None:
        for each in self._trackers:
            for text in each.listen():
                self._notice(text)

    def close(self, impatient: Callable[[], bool]) -> None:
        """Lets trackers send the rest of the data and end. Blocking for at most CLOSE_SECONDS, and only until
        `impatient` returns True; a tracker that has not ended by then is killed and reported. Idempotent."""
        for each in self._trackers:
            each.close_input()
        until = clock.now() + CLOSE_SECONDS
        self._listen()
        while any(not each.ended for each in self._trackers) and clock.now() < until and not impatient():
            for each in self._trackers:
                if not each.ended:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        each.process.wait(0.1)
                    break
            self._listen()
        for each in self._trackers:
            if not each.ended:
                each.kill()
                each.failed = True
                self._listen()
                self._notice(f"tracker {each.name} did not end within {CLOSE_SECONDS:.0f} s and was killed; send the "
                             "figures again with decentnode track")  # fmt: skip
        self._trackers.clear()
