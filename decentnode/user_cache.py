"""Files that are kept between runs: in $XDG_CACHE_HOME/decentnode, else ~/.cache/decentnode. All may be deleted."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def folder() -> Path:
    """Returns the folder of kept files, which is made if need be. Raises OSError where others could write into it."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decentnode"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not ours(found):
        raise OSError(f"{found} belongs to, or can be written by, somebody else")
    return found


def ours(path: Path) -> bool:
    """Whether a path is this user's own, no link, and can be written by no other user."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not path.is_symlink()


def read(name: str) -> str | None:
    """Returns the text of a kept file; None where there is none that only this user can have written."""
    try:
        path = folder() / name
        return path.read_text() if ours(path) else None
    except (OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: a user without a home
        return None


def keep(name: str, text: str) -> None:
    """Keep a text; other processes see all of it or nothing. Where nothing can be kept, nothing happens."""
    try:
        handle, new = tempfile.mkstemp(dir=folder(), suffix=".new")  # mode 600
    except (OSError, RuntimeError):
        return
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(new).replace(folder() / name)
    except OSError:
        Path(new).unlink(missing_ok=True)
