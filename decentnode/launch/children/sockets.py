"""Private folders for Unix sockets, of a run and of the fork server, removed at the end. When the process that made
them is killed, the fork server removes them as the last process of the run (server_end.py), or else the next run does.

With it go publish buffers in shared memory that bear its name (communication/shared_memory/publish_buffer.py): of nodes
that were killed early. The folders lie where every user of the machine may make files, so that names, links and owners
prove nothing: what is removed has a name that this file gives, is this user's own, and is reached without following a
link.
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
"""Longest path of the folder; that of a Unix socket may have 107 bytes."""
UNFINISHED_SECONDS = 3600.0
"""Age from which a folder without a lock counts as left behind by a run that was killed while it made it."""

_RANDOM = re.compile(r"[a-z0-9_]{8}")  # what tempfile.mkdtemp puts behind a prefix
_BUFFER = re.compile(r"-\d+-[0-9a-f]+-\d+(-lent)?")  # generation and uid, as `path_of` of publish buffers names them


def base_folder() -> Path:
    """Returns the folder for temporary files, or /tmp where its path is too long for those of sockets. Raises
    EnvironmentFault if nothing can be written to any folder for temporary files."""
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError as error:  # its text names the folders that were tried
        raise EnvironmentFault(f"{error.strerror}: free some space there, or set TMPDIR to a folder that can be "
                               "written to") from error  # fmt: skip
    return Path("/tmp" if len(os.fsencode(base)) + len(PREFIX) + 10 > MAX_PATH_BYTES else base)


class SocketDir:
    """A private folder for Unix sockets. It counts as used while its lock is held; the system releases the lock however
    the process ends."""

    def __init__(self) -> None:
        base = base_folder()
        remove_stale(base)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        # The file is locked before it bears the name by which remove_stale looks for it: there is no moment at which
        # another run that starts could take this one for gone.
        unlocked = Path(self.path, UNLOCKED)
        self._lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.path, LOCK))

    def remove(self) -> None:
        """Remove the folder and the publish buffers that bear its name. Idempotent."""
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
    """Remove this user's folders whose run is gone. Never raises."""
    with contextlib.suppress(OSError):
        for folder in list(_own_folders(base)):
            with contextlib.suppress(OSError):
                _remove_if_stale(folder)


def _own_folders(base: Path) -> Iterator[Path]:
    """Yields folders (not links) of this user whose names are as `SocketDir` makes them."""
    with os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _RANDOM.fullmatch(entry.name[len(PREFIX) :]):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                    yield base / entry.name


def _remove_if_stale(folder: Path) -> None:
    """Remove a folder whose run is gone. Raises OSError where the run lives, or the folder is not one of
    `SocketDir`."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(inside).st_uid != os.getuid():
            return
        try:
            lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
        except FileNotFoundError:
            if clock.wall() - os.fstat(inside).st_mtime > UNFINISHED_SECONDS:
                _remove(folder)
            return
        try:
            found = os.fstat(lock)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:  # else another run was quicker, and the name may be a third one's by now
                    _remove(folder)
        finally:
            os.close(lock)
    finally:
        os.close(inside)
