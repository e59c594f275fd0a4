"""supervisor.json in a run directory: the process that runs the run, for as long as it does.

The supervisor removes the file at its end, however the run went: a file whose process is gone tells that the supervisor
was killed. A process number alone proves nothing, because the system gives it to another process later.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from decentnode.system import boot_id, process_began, write_atomic

FILE = "supervisor.json"


@dataclass(frozen=True)
class Supervisor:
    """A process, and what tells it from another one of its number."""

    pid: int
    began: str
    """When the process began, in the system's clock ticks since the machine did; "" where the system does not tell."""
    host: str
    boot: str
    """Identity of the machine's last start; "" where the system does not tell."""

    @property
    def gone(self) -> bool:
        """Whether the process is known to have ended. Of one on another machine nothing is known."""
        if self.host != socket.gethostname():
            return False
        return self.boot != _boot() or not _runs(self.pid) or self.began != process_began(self.pid)


def write(run: Path) -> None:
    """Note that this process runs the run. A disk that refuses costs the word of `died` alone."""
    own = Supervisor(os.getpid(), process_began(os.getpid()), socket.gethostname(), _boot())
    with contextlib.suppress(OSError):
        write_atomic(run / FILE, json.dumps(asdict(own)) + "\n")


def remove(run: Path) -> None:
    """Note that the supervisor ends."""
    with contextlib.suppress(OSError):
        (run / FILE).unlink(missing_ok=True)


def died(run: Path) -> str:
    """Returns a sentence when the run's supervisor was killed before it could end the run, else ""."""
    found = _of(run)
    if found is None or not found.gone:
        return ""
    return f"the run ended without a result: its supervisor, process {found.pid}, is gone"


def ended(run: Path, node: Path) -> str:
    """Returns a sentence when nothing runs a node of a run any more, else "". node: its folder, which has the file
    where the node has no supervisor but itself."""
    there = [folder for folder in (node, run) if (folder / FILE).exists()]
    return died(there[0]) if there else "the run is over"


def _of(run: Path) -> Supervisor | None:
    try:
        fields = json.loads((run / FILE).read_text(encoding="utf-8"))
        return Supervisor(int(fields["pid"]), str(fields["began"]), str(fields["host"]), str(fields["boot"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _boot() -> str:
    try:
        return boot_id()
    except OSError:
        return ""
