"""Makes private folders for Unix sockets, for a run and for the fork server, and removes them at the end. If a process
is killed, the fork server removes its folder as the last process of the run (server_cleanup.py), or else the next run
does.

With a folder, publish buffers in shared memory that have its name are removed
(communication/shared_memory/publish_buffer.py); nodes that were killed leave them. The folders are where every user of
the machine may create files, so that no name, link or owner alone can be trusted: only files with a name given by this
module that belong to this user are removed, and no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from decentnode import clock
from decentnode.errors import EnvironmentFault

PREFIX = "decentnode-"
LOCK, UNLOCKED = "lock", "lock.new"
BUFFERS = Path("/dev/shm")
MAX_PATH_BYTES = 80
"""Longest path of the folder; the path of a Unix socket may have 107 bytes."""
UNFINISHED_SECONDS = 3600.0
"""Age from which a folder without a lock counts as left by a run that was killed while it made the folder."""

_RANDOM = re.compile(r"[a-z0-9_]{8}")  # what tempfile.mkdtemp appends to a prefix
_BUFFER = re.compile(r"-\d+-[0-9a-f]+-\d+(-lent)?")  # generation and uid, as publish_buffer.buffer_path names them


def base_folder() -> Path:
    """Returns the folder for temporary files, or /tmp if its path is too long for the paths of sockets. Raises
    EnvironmentFault if no folder for temporary files is writable."""
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError as error:  # its text names the folders that were tried
        raise EnvironmentFault(f"{error.strerror}: free some space there, or set TMPDIR to a folder that can be "
                               "written to") from error  # fmt: skip
    return Path("/tmp" if len(os.fsencode(base)) + len(PREFIX) + 10 > MAX_PATH_BYTES else base)


class SocketDir:
    """A private folder for Unix sockets. It counts as in use while its lock is held; the system releases the lock when
    the process ends in any way."""

    def __init__(self) -> None:
        base = base_folder()
        remove_stale(base)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        # The file is locked before it gets the name by which remove_stale looks for it, so that a run that starts
        # meanwhile can at no moment mistake this folder for a stale one.
        unlocked = Path(self.path, UNLOCKED)
        self._lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.path, LOCK))

    def remove(self) -> None:
        """Removes the folder and the publish buffers with its name. Idempotent."""
        if self._lock >= 0:
            _remove(Path(self.path))
            os.close(self._lock)
            self._lock = -1


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(BUFFERS) as entries:
        for buffer in entries:
            if buffer.name.startswith(folder.name) and _BUFFER.fullmatch(buffer.name[len(folder.name) :]):
                with contextlib.suppress(OSError):
                    if buffer.stat(follow_symlinks=False).st_uid == os.getuid():
                        os.unlink(buffer.path)
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(base: Path) -> None:
    """Removes this user's folders whose run has ended. Never raises."""
    with contextlib.suppress(OSError):
        for folder in list(_own_folders(base)):
            with contextlib.suppress(OSError):
                _remove_if_stale(folder)


def _own_folders(base: Path) -> Iterator[Path]:
    """Yields this user's folders (not links) with names of the form that `SocketDir` gives them."""
    with os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _RANDOM.fullmatch(entry.name[len(PREFIX) :]):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    yield base / entry.name


def _remove_if_stale(folder: Path) -> None:
    """Removes a folder if its run has ended. Raises OSError if the run is alive, or if the folder is not one that
    `SocketDir` makes."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder_fd).st_uid != os.getuid():
            return
        try:
            lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
        except FileNotFoundError:
            if clock.wall() - os.fstat(folder_fd).st_mtime > UNFINISHED_SECONDS:
                _remove(folder)
            return
        try:
            status = os.fstat(lock)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:  # else another run removed it first, and the name may be a new run's by now
                    _remove(folder)
        finally:
            os.close(lock)
    finally:
        os.close(folder_fd)
