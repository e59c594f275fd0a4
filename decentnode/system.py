"""What the operating system offers: files that are replaced at once, and which boot of the host this is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` for a new file or link, which replaces the one at `path` at the end of the block;
    where the block raises, the new one is removed and the old one stays. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace the file `path` atomically: readers see the old or the new text, never a part. Raises OSError.

    durable: this holds after a power cut too; blocking until the disk has the file.
    """
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
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
