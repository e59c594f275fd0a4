"""A segment of shared memory: a file in /dev/shm that one process makes and others of the same user map.

The publish buffers of nodes (publish_buffer.py) and the buckets of ranks (parallel/transports/shared_memory.py) lie in
segments. This file knows nothing of either: it makes a file where there is room, maps it, gives views of it, takes its
name away, removes what killed processes left behind, and tells whether the process that made a segment still lives.

A segment has a header of 8-byte words, which its owner and its readers write, and behind it a body that its owner alone
can write. Every word has one process that writes it, as a whole and aligned, so that a reader sees the value before or
the one after. Whether a reader that sees a word also sees the bytes of the body that were written before it depends on
the processor: those of x86 keep stores in order and loads in order; others do not (`stores_in_order`), and there a
system call must lie between, such as the doorbells of publish buffers.
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
"""What is left free of the folder, which is the host's memory."""
STALE_SECONDS = 60.0
"""Age from which a file that nobody has locked counts as left behind; it is locked microseconds after it is made."""


def rounded(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit


def placed(sizes: Iterable[int], start: int) -> tuple[list[int], int]:
    """(where tensors of so many bytes begin, where the last one ends), aligned, the first at `start`."""
    starts = []
    for size in sizes:
        starts.append(start)
        start += rounded(size, ALIGNMENT)
    return starts, start


def free_bytes(folder: Path = FOLDER) -> int:
    """How much more shared memory this host has. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def stores_in_order() -> bool:
    """Whether who sees a word also sees all that was written before it (see above), on this processor."""
    return platform.machine() in ("x86_64", "AMD64")


class Segment:
    """One segment as one process has it mapped; use `create` or `attach`. Not blocking.

    Views keep the mapping alive, so that there is nothing to close but the file that `watched` keeps open.
    """

    def __init__(self, path: Path, file: int, size: int, header_bytes: int, owner: bool) -> None:
        self.path, self.size, self.header_bytes = path, size, header_bytes
        self._file, self._linked = file, owner
        if owner:
            # One mapping, not two: it has a descriptor of its own, and the lock ends when any descriptor is closed.
            self._header = self._body = mmap.mmap(file, size)
        else:
            self._header = mmap.mmap(file, header_bytes)
            self._body = mmap.mmap(file, size - header_bytes, prot=mmap.PROT_READ, offset=header_bytes)
        self._body_start = 0 if owner else header_bytes

    @classmethod
    def create(cls, path: Path, size: int, header_bytes: int, watched: bool = False) -> Segment:
        """A segment of zeros that nobody has yet; its memory is taken here, not when it is written first.

        header_bytes: a multiple of PAGE, below `size`. watched: readers may ask `owner_is_gone`; nobody else in this
        process may open the file then. Raises OSError where there is no room or no right to make the file.
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
        """Another process's segment, of which only the header can be written. watched: as its owner said.

        Raises OSError where it cannot be opened, ValueError where it is not of this size or not this user's.
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

    # -- what lies in it --------------------------------------------------------------------------------------

    def words(self, first: int, count: int) -> memoryview:
        """[count] signed 8-byte words of the header."""
        return memoryview(self._header)[8 * first : 8 * (first + count)].cast("q")

    def tensor(self, dtype: torch.dtype, count: int, start: int) -> Tensor:
        """[count] elements of the body from byte `start` of the segment on. Only the owner may write them: in another
        process to do so ends it with SIGSEGV."""
        if not count:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about memory that cannot be written
            return torch.frombuffer(self._body, dtype=dtype, count=count, offset=start - self._body_start)

    def write(self, start: int, data: bytes) -> None:
        """Owner: bytes of the body, from byte `start` of the segment on."""
        self._body[start : start + len(data)] = data

    def read(self, start: int, count: int) -> bytes:
        """At most `count` bytes of the body, from byte `start` of the segment on."""
        start -= self._body_start
        return self._body[start : start + count]

    # -- its name, its file, its owner --------------------------------------------------------------------------

    def unlink(self) -> None:
        """Owner: take the name away; the memory lives on in those who have it mapped. Idempotent."""
        if self._linked:
            self._linked = False
            self.path.unlink(missing_ok=True)

    def close_file(self) -> None:
        """No more questions after the owner; as the owner's last act, it counts as gone. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def owner_is_gone(self) -> bool:
        """Whether the process that made a watched segment has ended, or has given it up. Two system calls."""
        return not _is_locked(self._file)


def _is_locked(file: int) -> bool:
    """Whether another process has a record lock on a file.

    The system takes such a lock away when the process ends, however it ends. A socket or flock would stay open in
    worker processes that it has forked, and pidfd_open is missing in kernels before 5.3.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another process holds
        return True
    fcntl.lockf(file, fcntl.LOCK_UN)
    return False


def remove_stale(names: re.Pattern[str], folder: Path = FOLDER) -> None:
    """Remove watched segments of this user whose owners were killed before they took the names away. Never raises.

    names: what names as a whole must be like. Nothing in this process may have such a segment under its name.
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
    """Sleeps between looks at a word: the first is short, each next one twice as long, up to the longest."""

    def __init__(self, seconds: tuple[float, float]) -> None:
        """seconds: the shortest and the longest sleep."""
        self._pause, self._longest = seconds

    def sleep(self) -> None:
        clock.sleep(self._pause)
        self._pause = min(2 * self._pause, self._longest)
