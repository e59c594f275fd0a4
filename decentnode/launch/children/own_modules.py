"""Which of the modules that a process has imported are the user's own. Nothing here imports torch."""

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
    """The user's own modules among those that this process has imported. What was looked at is not looked at again, not
    even for its name: a process of a node is a fork, and writing to the reference counts of 3,000 modules that it
    shares with others would copy the memory that they lie in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: ModuleType | None = None
        self._found: dict[str, str] = {}

    def files(self) -> dict[str, str]:
        """Returns name -> real path."""
        with self._lock:
            new = self._new()
            for name, module in reversed(new):
                self._found.pop(name, None)
                path = getattr(module, "__file__", None)
                if name not in ("__main__", "__mp_main__") and isinstance(path, str) and path.endswith(".py") \
                        and (real := _own_file(path)):  # fmt: skip
                    self._found[name] = real
            self._last = new[0][1] if new else self._last
            return {name: path for name, path in self._found.items() if name in sys.modules and os.path.isfile(path)}

    def _new(self) -> list[tuple[str, ModuleType]]:
        """Returns what was imported since the last look, the latest first."""
        while True:
            with contextlib.suppress(RuntimeError):  # another thread has imported a module meanwhile
                latest = reversed(sys.modules.items())
                return list(itertools.takewhile(lambda each: each[1] is not self._last, latest))


_own_modules = _OwnModules()


def local_modules() -> dict[str, str]:
    """Returns name -> path of every imported Python file that is neither installed, nor Python's, nor decentnode's."""
    return _own_modules.files()


def _own_file(path: str) -> str:
    """Returns the real path of a file of the user's own; "" of others."""
    if os.path.abspath(path).startswith(_elsewhere()):  # also links: Debian's sitecustomize.py is one to /etc
        return ""
    if os.path.islink(path):
        real = os.path.realpath(path)
    else:  # of a folder once: of 3,000 files it took 200 ms
        real = os.path.join(_real_folder(os.path.dirname(path)), os.path.basename(path))
    folders = real.split(os.sep)
    installed = real.startswith(_elsewhere()) or "site-packages" in folders or "dist-packages" in folders
    return "" if installed else real


@functools.cache
def _real_folder(path: str) -> str:
    return os.path.realpath(path)


@functools.cache
def _elsewhere() -> tuple[str, ...]:
    """Folders of files that are Python's, installed, or decentnode's."""
    folders = [*(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
               os.path.dirname(version.__file__)]  # fmt: skip
    return tuple({os.path.realpath(folder) + os.sep for folder in folders})
