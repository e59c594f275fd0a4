"""A segment of shared memory: a file in /dev/shm that one process creates and other processes of the same user map.

The publish buffers of nodes (publish_buffer.py) and the buckets of ranks (parallel/transports/shared_memory.py) lie in
segments. This file knows nothing of either. It creates a file if there is room, maps it, gives views of it, unlinks it,
removes the files that killed processes left behind, and tells whether the process that created a segment is alive.

A segment has a header of 8-byte words, which its owner and its readers write, and after it a body that only its owner
can write. Every word is written by one process, as a whole and aligned, so that a reader sees either the old value or
the new one. Whether a reader that sees a word also sees the bytes of the body that were written before it depends on
the processor: x86 processors keep the order of stores and of loads; others do not (`stores_in_order`), and there a
system call must lie in between, such as the doorbells of publish buffers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import re
import stat
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from decentnode import clock

FOLDER = Path("/dev/shm")
PAGE, ALIGNMENT = 4096, 128
"""Bytes. Tensors begin at multiples of ALIGNMENT: two cache lines, which processors fetch in pairs."""
RESERVE_BYTES = 16 << 20
"""Bytes of the folder, which is the host's memory, that are left free."""
STALE_SECONDS = 60.0
"""Age from which an unlocked file counts as left behind. Files are locked microseconds after they are created."""


def rounded(size: int, unit: int) -> int:
    """Returns the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def placed(sizes: Iterable[int], start: int) -> tuple[list[int], int]:
    """Returns (the start of each tensor, the end of the last one) for tensors of these sizes in bytes. Starts are
    aligned; the first tensor begins at `start`."""
    starts = []
    for size in sizes:
        starts.append(start)
        start += rounded(size, ALIGNMENT)
    return starts, start


def free_bytes(folder: Path = FOLDER) -> int:
    """Returns how many bytes of shared memory this host has left. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def stores_in_order() -> bool:
    """Returns whether, on this processor, a reader that sees a word also sees everything written before it (see
    above)."""
    return platform.machine() in ("x86_64", "AMD64")


class Segment:
    """One segment as mapped by one process. Use `create` or `attach`. Does not block.

    Views keep the mapping alive, so nothing needs to be closed except the file that `watched` keeps open.
    """

    def __init__(self, path: Path, file: int, size: int, header_bytes: int, owner: bool) -> None:
        self.path, self.size, self.header_bytes = path, size, header_bytes
        self._file, self._is_linked = file, owner
        if owner:
            # One mapping, not two: a mapping has a descriptor of its own, and closing any descriptor ends the lock.
            self._header = self._body = mmap.mmap(file, size)
        else:
            self._header = mmap.mmap(file, header_bytes)
            self._body = mmap.mmap(file, size - header_bytes, prot=mmap.PROT_READ, offset=header_bytes)
        self._body_start = 0 if owner else header_bytes

    @classmethod
    def create(cls, path: Path, size: int, header_bytes: int, watched: bool = False) -> Segment:
        """Creates a segment of zeros. Its memory is allocated here, not at the first write.

        header_bytes: a multiple of PAGE, below `size`. watched: readers may call `owner_is_gone`; then nothing else in
        this process may open the file. Raises OSError if there is no room or no permission to create the file.
        """
        free = free_bytes(path.parent)
        if free < size + RESERVE_BYTES:
            raise OSError(errno.ENOSPC, f"{path.parent} has {free >> 20} MiB left, shared memory needs {size >> 20} "
                          "MiB")  # fmt: skip
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if watched:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(file, 0, size)
            made = cls(path, file, size, header_bytes, owner=True)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        if not watched:
            made.close_file()
        return made

    @classmethod
    def attach(cls, path: Path, size: int, header_bytes: int, watched: bool = False) -> Segment:
        """Maps another process's segment, of which only the header is writable. watched: as in `create`.

        Raises OSError if the file cannot be opened, ValueError if it has another size or belongs to another user.
        """
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            found = os.fstat(file)
            if found.st_size != size or found.st_uid != os.geteuid():
                raise ValueError(f"{path}: {found.st_size} bytes of user {found.st_uid}")
            mapped = cls(path, file, size, header_bytes, owner=False)
        except BaseException:
            os.close(file)
            raise
        if not watched:
            mapped.close_file()
        return mapped

    # -- contents ---------------------------------------------------------------------------------------------

    def words(self, first: int, count: int) -> memoryview:
        """Returns [count] signed 8-byte words of the header."""
        return memoryview(self._header)[8 * first : 8 * (first + count)].cast("q")

    def tensor(self, dtype: torch.dtype, count: int, start: int) -> Tensor:
        """Returns a tensor of [count] elements of the body, from byte `start` of the segment on. Only the owner may
        write it: in another process, writing ends the process with SIGSEGV."""
        if not count:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about memory that cannot be written
            return torch.frombuffer(self._body, dtype=dtype, count=count, offset=start - self._body_start)

    def write(self, start: int, data: bytes) -> None:
        """Owner: writes bytes of the body, from byte `start` of the segment on."""
        self._body[start : start + len(data)] = data

    def read(self, start: int, count: int) -> bytes:
        """Returns at most `count` bytes of the body, from byte `start` of the segment on."""
        start -= self._body_start
        return self._body[start : start + count]

    # -- name, file, owner --------------------------------------------------------------------------------------

    def unlink(self) -> None:
        """Owner: removes the file's name; the memory lives on in the processes that have mapped it. Idempotent."""
        if self._is_linked:
            self._is_linked = False
            self.path.unlink(missing_ok=True)

    def close_file(self) -> None:
        """Closes the file of a watched segment, after which `owner_is_gone` must not be called. If the owner calls it,
        the owner counts as gone. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def owner_is_gone(self) -> bool:
        """Returns whether the process that created a watched segment has ended or has called `close_file`. Two system
        calls."""
        return not _is_locked(self._file)


def _is_locked(file: int) -> bool:
    """Returns whether another process has a record lock on a file.

    The system removes such a lock when the process ends, however it ends. A socket or flock would stay open in worker
    processes that it has forked, and pidfd_open is missing in kernels before 5.3.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another process holds
        return True
    fcntl.lockf(file, fcntl.LOCK_UN)
    return False


def remove_stale(names: re.Pattern[str], folder: Path = FOLDER) -> None:
    """Removes watched segments of this user whose owners were killed before they unlinked them. Never raises.

    names: pattern that the whole file name must match. This process must not itself have a matching segment that is not
    unlinked.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_stale(entry)


def _remove_if_stale(entry: os.DirEntry[str]) -> None:
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or clock.wall() - found.st_mtime < STALE_SECONDS:
        return
    file = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not _is_locked(file):
            os.unlink(entry.path)
    finally:
        os.close(file)


class Backoff:
    """Sleeps between polls of a word: the first sleep is short, each further one twice as long, up to the longest."""

    def __init__(self, seconds: tuple[float, float]) -> None:
        """seconds: the shortest and the longest sleep."""
        self._pause, self._longest = seconds

    def sleep(self) -> None:
        clock.sleep(self._pause)
        self._pause = min(2 * self._pause, self._longest)
