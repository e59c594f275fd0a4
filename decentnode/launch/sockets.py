"""A private folder for Unix sockets, removed at the end, or by the next run when this one is killed.

With it go boards in shared memory that bear its name (communication/board.py): of nodes that were killed early.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "decentnode-"
LOCK = "lock"
BOARDS = Path("/dev/shm")
MAX_PATH_BYTES = 80
"""Of the folder; the path of a Unix socket may have 107."""


class SocketDir:
    """The folder lives as long as its lock is held, which the system lets go of however the process ends."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) + len(PREFIX) + 10 > MAX_PATH_BYTES:
            base = "/tmp"
        remove_stale(Path(base))
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        self._lock = os.open(Path(self.path, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            _remove(Path(self.path))
            os.close(self._lock)
            self._lock = -1


def _remove(folder: Path) -> None:
    for board in BOARDS.glob(f"{folder.name}-*"):
        with contextlib.suppress(OSError):
            board.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(base: Path) -> None:
    """Remove this user's folders whose run is gone. Never raises."""
    for lock in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock.parent)
            finally:
                os.close(file)
        except OSError:
            continue
