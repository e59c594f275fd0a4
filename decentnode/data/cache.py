"""Samples converted once into arrays on disk, which every later run maps into memory.

A node then copies its share only, and nodes of one machine share the pages. An index lies in a folder whose name is a
digest of what it was made from: names, sizes and times of change of the files, and the options. It is written beside,
and moved to its name when it is whole; a second process waits for the first. One that is cut short, or whose content
is not what was written, is made anew: content is looked at where a file has another time of change than it was left
with, and by `decentnode data prepare` in any case.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from decentnode.errors import DataError

logger = logging.getLogger(__name__)

VERSION = 2
"""Of the layout; indices of another one are made anew."""
WAIT_SECONDS = 3600.0
"""How long a process waits for another one that makes the same index."""
META = "index.json"


class Index:
    """Arrays of equal or different length, mapped from disk, and notes about them."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, ValueError, KeyError, TypeError or AttributeError when the folder is not a whole index, or
        has changed."""
        self.folder = folder
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["version"] != VERSION:
            raise ValueError("another version")
        self.notes: dict[str, Any] = meta["notes"]
        self._arrays: dict[str, Any] = meta["arrays"]
        for name, entry in self._arrays.items():
            expected = math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
            if (folder / f"{name}.bin").stat().st_size != expected:
                raise ValueError(f"{name}.bin is cut short")
        self._check_changed()

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._arrays[name]
        if 0 in entry["shape"]:
            return np.empty(entry["shape"], entry["dtype"])
        # Mode c maps privately: pages stay shared while nobody writes, and torch takes the array without a warning.
        return np.memmap(self.folder / f"{name}.bin", entry["dtype"], mode="c", shape=tuple(entry["shape"]))

    def _check_changed(self) -> None:
        """Looks at the content of files that were written again since: copied to here, or damaged."""
        changed = {name: written for name, entry in self._arrays.items()
                   if (written := (self.folder / f"{name}.bin").stat().st_mtime_ns) != entry["written"]}  # fmt: skip
        if not changed:
            return
        if bad := [name for name in self.damaged() if name in changed]:
            raise ValueError(f"{', '.join(bad)} has changed")
        for name, written in changed.items():
            self._arrays[name]["written"] = written
        with contextlib.suppress(OSError):  # of a folder that can only be read: looked at again next time
            _write_meta(self.folder, self.notes, self._arrays)

    def discard(self) -> None:
        """Let the next one who asks for this index make it anew. What is mapped stays valid."""
        (self.folder / META).unlink(missing_ok=True)

    def damaged(self) -> list[str]:
        """Reads everything, and returns the arrays whose content is not what was written."""
        return [name for name, entry in self._arrays.items() if _digest(self.folder / f"{name}.bin") != entry["digest"]]


class Writer:
    """Takes rows of named arrays; no more of them than one call brings is in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: dict[str, Any] = {}
        self._open: dict[str, tuple[BinaryIO, Any, np.dtype, tuple[int, ...]]] = {}
        self._rows: dict[str, int] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        """rows: [N, ...] of the same dtype and shape of a row as before."""
        if name not in self._open:
            made = open(self.folder / f"{name}.bin", "wb")  # noqa: SIM115 - closed by `finish` or `abort`
            self._open[name] = (made, hashlib.blake2b(digest_size=16), rows.dtype, rows.shape[1:])
            self._rows[name] = 0
        file, digest, dtype, shape = self._open[name]
        assert rows.dtype == dtype and rows.shape[1:] == shape
        content = np.ascontiguousarray(rows).tobytes()
        file.write(content)
        digest.update(content)
        self._rows[name] += len(rows)

    def finish(self) -> None:
        arrays = {}
        for name, (file, digest, dtype, shape) in self._open.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            arrays[name] = {"dtype": dtype.str, "shape": [self._rows[name], *shape], "digest": digest.hexdigest(),
                            "written": (self.folder / f"{name}.bin").stat().st_mtime_ns}  # fmt: skip
        _write_meta(self.folder, self.notes, arrays)

    def abort(self) -> None:
        for file, *_ in self._open.values():
            file.close()


def _write_meta(folder: Path, notes: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Writes the description of an index beside, and moves it to its name: others may read it meanwhile."""
    descriptor, partial = tempfile.mkstemp(dir=folder, prefix=f".{META}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, "notes": notes, "arrays": arrays}, file)
        Path(partial).chmod(0o644)
        Path(partial).replace(folder / META)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def root() -> Path:
    """The folder of all indices: DECENTNODE_CACHE, or decentnode in the user's cache."""
    if chosen := os.environ.get("DECENTNODE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decentnode"


def indexed(
    kind: str, sources: Sequence[Path], options: Mapping[str, Any], build: Callable[[Writer], None],
    folder: Path | None = None, wait_seconds: float = WAIT_SECONDS,
) -> Index:
    """Returns the index of `sources`, made by `build` when there is none yet (blocking, logged).

    folder: of all indices, instead of `root()`. Raises DataError when it cannot be written, or another process that
    makes it does not come to an end within wait_seconds; whatever `build` raises passes through, and leaves nothing.
    """
    name = f"{kind}-{_key(kind, sources, options)}"
    base = folder or root()
    if (found := _opened(base / name)) is not None:
        return found
    try:
        base.mkdir(parents=True, exist_ok=True)
        with _locked(base / f".{name}.lock", wait_seconds):
            if (found := _opened(base / name)) is not None:  # another process made it meanwhile
                return found
            logger.info("indexing %s once: %d files into %s", kind, len(sources), base / name)
            return _made(base, name, build)
    except OSError as error:
        raise DataError(
            f"{base}: {kind} cannot be indexed there: {error}; DECENTNODE_CACHE names another folder") from error


def _made(base: Path, name: str, build: Callable[[Writer], None]) -> Index:
    shutil.rmtree(base / name, ignore_errors=True)  # one that is not whole
    partial = Path(tempfile.mkdtemp(dir=base, prefix=f".{name}."))
    writer = Writer(partial)
    try:
        build(writer)
        writer.finish()
        partial.chmod(0o755)
        partial.rename(base / name)
    except BaseException:
        writer.abort()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Index(base / name)


def _opened(folder: Path) -> Index | None:
    try:
        return Index(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a description of any shape
        return None


@contextlib.contextmanager
def _locked(path: Path, wait_seconds: float) -> Iterator[None]:
    """One process at a time. The lock is the kernel's: it ends with its process."""
    with open(path, "a+", encoding="ascii") as file:
        if not _lock(file, wait_seconds):
            file.seek(0)
            raise DataError(
                f"{path}: process {file.read(20).strip() or 'unknown'} has been making this index for "
                f"{wait_seconds:g} s; waited for it in vain"
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _lock(file: TextIO, wait_seconds: float) -> bool:
    """Returns whether the lock was had in time. flock has no timeout: a thread waits where somebody holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        waiter = threading.Thread(target=_wait_for_lock, args=(os.dup(file.fileno()),), daemon=True)
        waiter.start()
        waiter.join(wait_seconds)
        return not waiter.is_alive()


def _wait_for_lock(descriptor: int) -> None:
    """descriptor: one of its own, as the file may be closed by then. The lock stays while either is open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _key(kind: str, sources: Sequence[Path], options: Mapping[str, Any]) -> str:
    facts: list[Any] = [VERSION, kind, sorted((key, str(value)) for key, value in options.items())]
    for path in sources:
        found = path.stat()
        facts.append([str(path.resolve()), found.st_size, found.st_mtime_ns])
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
