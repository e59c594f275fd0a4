"""Operating-system helpers: atomic file replacement, the limit of open files, the identity of boots and processes, and
a block in which the Hugging Face hub is offline."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import resource
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from decentnode import entropy

disk_full_checks: list[Callable[[], bool]] = []
"""Functions that return whether an injected fault says that the disk is full now (node/faults.py)."""


def check_disk() -> None:
    """Raises OSError (ENOSPC) if an injected fault says that the disk is full. Called before a file is written."""
    if disk_full_checks and any(is_full() for is_full in disk_full_checks):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` for a new file or link, which replaces `path` at the end of the block.

    If the block raises, the new file is removed and the old one stays. Raises OSError, to which it adds the name of
    `path` if the system gives none, as for a write on a full disk.
    """
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
    """Removes temporary files that `replacing` left below `folder` in processes that were killed. Raises nothing."""
    killed = {*map(str, pids)}
    with contextlib.suppress(OSError):
        for each in list(folder.rglob(".*.*.??????")) if killed else ():
            if each.name.split(".")[-2] in killed:
                each.unlink(missing_ok=True)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Replaces the file `path` atomically: readers see the old or the new text, never a part of it. Raises OSError.

    A symbolic link stays, and the file that it points to is replaced; what is not a regular file, such as /dev/stdout,
    is written to directly. text: may contain file names with surrogate escapes for bytes that the locale cannot decode.
    durable: also survive a power failure; blocks until the file is on disk.
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


def raise_open_files_limit() -> None:
    """Raises this process's limit of open files, which include pipes and sockets, to the hard limit: many systems start
    with 1,024, some with 256. `launch.open_files` counts what a run needs; each connection that a stranger opens to a
    node takes one more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def boot_id() -> str:
    """Returns the id of this host's boot; process ids and the monotonic clock are comparable only within one boot.

    Raises OSError if the system does not provide it.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_start_time(pid: int) -> str:
    """Returns the start time of a process of this host, in clock ticks since boot; it identifies the process even if
    the system reuses its pid. Returns "" if the process has ended or the system does not provide the time."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # a zombie has ended; only its pid is left
    except (OSError, ValueError, IndexError):
        return ""


@contextlib.contextmanager
def hub_offline() -> Iterator[None]:
    """Makes huggingface_hub, from which other libraries load weights and datasets, use only its local cache within the
    block."""
    before, name = os.environ.get("HF_HUB_OFFLINE"), "huggingface_hub.constants"
    was = getattr(sys.modules.get(name), "HF_HUB_OFFLINE", before not in (None, "", "0"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants: Any = None
    with contextlib.suppress(ImportError):
        constants = importlib.import_module(name)
        constants.HF_HUB_OFFLINE = True  # the library reads the variable only once, on import
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
        if constants is not None:
            constants.HF_HUB_OFFLINE = was
