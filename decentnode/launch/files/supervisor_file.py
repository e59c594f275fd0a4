"""Writes and reads supervisor.json in a run directory, which names the process that supervises the run.

The supervisor removes the file when it ends, with any exit code: a file whose process is gone means that the supervisor
was killed. A process number alone proves nothing, because the system later gives it to another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from decentnode.system import boot_id, process_start_time, write_atomic

FILE = "supervisor.json"


@dataclass(frozen=True)
class Supervisor:
    """A supervisor process, identified beyond its process number."""

    pid: int
    began: str
    """When the process began, in the system's clock ticks since boot; "" if the system does not say."""
    host: str
    boot: str
    """Identity of the machine's last boot; "" if the system does not say."""

    @property
    def gone(self) -> bool:
        """Whether the process is known to have ended; False for a process on another machine."""
        if self.host != socket.gethostname():
            return False
        return self.boot != _boot_id() or not _is_running(self.pid) or self.began != process_start_time(self.pid)


def write(run: Path) -> None:
    """Writes the file for this process. If the disk refuses, `died` and `ended` cannot tell later
    whether the process was killed."""
    own = Supervisor(os.getpid(), process_start_time(os.getpid()), socket.gethostname(), _boot_id())
    with contextlib.suppress(OSError):
        write_atomic(run / FILE, json.dumps(asdict(own)) + "\n")


def remove(run: Path) -> None:
    """Removes the file, because the supervisor ends. Never raises."""
    with contextlib.suppress(OSError):
        (run / FILE).unlink(missing_ok=True)


def died(run: Path) -> str:
    """Returns a sentence if the run's supervisor was killed before it could end the run, else ""."""
    supervisor = _read(run)
    if supervisor is None or not supervisor.gone:
        return ""
    return f"the run ended without a result: its supervisor, process {supervisor.pid}, is gone"


def ended(run: Path, node: Path) -> str:
    """Returns a sentence if no process runs a node of a run any more, else "". node: the node's folder, which has the
    file if the node runs without a supervisor."""
    folders = [folder for folder in (node, run) if (folder / FILE).exists()]
    return died(folders[0]) if folders else "the run is over"


def _read(run: Path) -> Supervisor | None:
    try:
        fields = json.loads((run / FILE).read_text(encoding="utf-8"))
        return Supervisor(int(fields["pid"]), str(fields["began"]), str(fields["host"]), str(fields["boot"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _boot_id() -> str:
    try:
        return boot_id()
    except OSError:
        return ""
