"""Files kept between runs in $XDG_CACHE_HOME/decentnode, else ~/.cache/decentnode. All of them may be deleted."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def folder() -> Path:
    """Returns the folder of the files, and creates it if needed. Raises OSError if other users could write into it."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decentnode"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not ours(found):
        raise OSError(f"{found} belongs to, or can be written by, another user")
    return found


def ours(path: Path) -> bool:
    """Returns whether a path belongs to this user, is not a link, and cannot be written by any other user."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not path.is_symlink()


def read(name: str) -> str | None:
    """Returns the text of a kept file, or None if there is no such file that only this user can have written."""
    try:
        path = folder() / name
        return path.read_text() if ours(path) else None
    except (OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: a user without a home
        return None


def keep(name: str, text: str) -> None:
    """Keeps a text under a name, atomically for other processes. Does nothing if the text cannot be written."""
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
