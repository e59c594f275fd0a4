"""Finds the user's own modules among those that a process has imported. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import sysconfig
import threading
from types import ModuleType

from decentnode import version


class _OwnModules:
    """Collects the user's own modules among those that this process has imported. A module that was examined once is
    not touched again, not even for its name: a node's process is a fork, and changing the reference counts of 3,000
    modules would copy the memory pages that it shares with other processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: ModuleType | None = None
        self._found: dict[str, str] = {}

    def files(self) -> dict[str, str]:
        """Returns the user's own modules: name -> real path."""
        with self._lock:
            new = self._new_modules()
            for name, module in reversed(new):
                self._found.pop(name, None)
                path = getattr(module, "__file__", None)
                if name not in ("__main__", "__mp_main__") and isinstance(path, str) and path.endswith(".py") \
                        and (real := _own_file(path)):  # fmt: skip
                    self._found[name] = real
            self._last = new[0][1] if new else self._last
            return {name: path for name, path in self._found.items() if name in sys.modules and os.path.isfile(path)}

    def _new_modules(self) -> list[tuple[str, ModuleType]]:
        """Returns the modules imported since the last call, the latest first."""
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has imported a module meanwhile
                latest = reversed(sys.modules.items())
                return list(itertools.takewhile(lambda each: each[1] is not self._last, latest))


_own_modules = _OwnModules()


def local_modules() -> dict[str, str]:
    """Returns every imported Python file that is neither installed, nor Python's, nor decentnode's: name -> path."""
    return _own_modules.files()


def _own_file(path: str) -> str:
    """Returns the real path of the file if it is the user's own, else ""."""
    # Before links are resolved: Debian's sitecustomize.py is a link to a file in /etc.
    if os.path.abspath(path).startswith(_foreign_folders()):
        return ""
    if os.path.islink(path):
        real = os.path.realpath(path)
    else:  # resolve each folder only once: resolving 3,000 files took 200 ms
        real = os.path.join(_real_folder(os.path.dirname(path)), os.path.basename(path))
    folders = real.split(os.sep)
    installed = real.startswith(_foreign_folders()) or "site-packages" in folders or "dist-packages" in folders
    return "" if installed else real


@functools.cache
def _real_folder(path: str) -> str:
    return os.path.realpath(path)


@functools.cache
def _foreign_folders() -> tuple[str, ...]:
    """Returns the folders of Python's, installed, and decentnode's own files."""
    folders = [*(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
               os.path.dirname(version.__file__)]  # fmt: skip
    return tuple({os.path.realpath(folder) + os.sep for folder in folders})
