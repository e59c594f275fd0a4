"""What the operating system offers: files that are replaced at once, which boot of the host this is, and an environment
in which nothing is downloaded."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from decentnode import entropy

full_disks: list[Callable[[], bool]] = []
"""Each tells whether a fault says that the disk is full now (node/faults.py)."""


def check_disk() -> None:
    """Before a file is written: raises OSError (ENOSPC) where a fault says that the disk is full."""
    if full_disks and any(is_full() for is_full in full_disks):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` for a new file or link, which replaces the one at `path` at the end of the block;
    where the block raises, the new one is removed and the old one stays. Raises OSError, with the name of `path` where
    the system tells none, as of a write on a full disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{entropy.word(3)}")
    try:
        check_disk()
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path, pids: Collection[int]) -> None:
    """Remove what `replacing` has left below `folder` of processes that were killed. Raises nothing."""
    killed = {*map(str, pids)}
    with contextlib.suppress(OSError):
        for each in list(folder.rglob(".*.*.??????")) if killed else ():
            if each.name.split(".")[-2] in killed:
                each.unlink(missing_ok=True)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace the file `path` atomically: readers see the old or the new text, never a part. A link stays, and the file
    that it leads to is replaced; what is no file, as /dev/stdout, is written to. Raises OSError.

    text: names of files in it may be as Python has them where their bytes are no text in the locale. durable: this
    holds after a power cut too; blocking until the disk has the file.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return
    path = path.resolve() if path.is_symlink() else path
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def boot_id() -> str:
    """Names the boot of this host: process ids and the monotonic clock mean something within one boot alone. Raises
    OSError where the system does not tell."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_began(pid: int) -> str:
    """When a process of this host began, in the system's clock ticks since the host did, which tells it from another
    one of its number; "" where it has ended, or where the system does not tell."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # of one that nobody has waited for, only its number is left
    except (OSError, ValueError, IndexError):
        return ""


@contextlib.contextmanager
def hub_offline() -> Iterator[None]:
    """In this block huggingface_hub, from which other libraries load weights and datasets, looks into its local cache
    alone."""
    before, name = os.environ.get("HF_HUB_OFFLINE"), "huggingface_hub.constants"
    was = getattr(sys.modules.get(name), "HF_HUB_OFFLINE", before not in (None, "", "0"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants: Any = None
    with contextlib.suppress(ImportError):
        constants = importlib.import_module(name)
        constants.HF_HUB_OFFLINE = True  # it is read once, when the library is imported
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
        if constants is not None:
            constants.HF_HUB_OFFLINE = was
