"""Digests of file contents: files with the same digest have the same content, whatever their names."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


def content_digest(path: Path) -> str:
    """Returns a 64-bit digest of a file's content as 16 hex digits, or "" if it cannot be read.

    Blocking: 1 GB takes about a second, once per process and version of the file.
    """
    try:
        found = path.stat()
        return _digest(path, found.st_size, found.st_mtime_ns)
    except OSError:
        return ""


@functools.lru_cache(maxsize=16)
def _digest(path: Path, size: int, changed: int) -> str:  # noqa: ARG001
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
