"""Converts samples once into arrays on disk, which every later run maps into memory.

A node then copies only its share, and the nodes of a machine share the pages. The arrays (an index) are in a folder
whose name is a digest of what they were made from: names, sizes and modification times of the files, and the options.
An index is written to a temporary folder and renamed when it is complete; a second process waits for the first. An
index that is incomplete, or whose content has changed, is made again. The content is checked if a file's modification
time differs from the recorded one, and always by `decentnode data prepare`.
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
"""The version of the layout; indices of other versions are made again."""
WAIT_SECONDS = 3600.0
"""How long a process waits for another process that is making the same index."""
META = "index.json"


class Index:
    """Named arrays, mapped from disk, and notes about them."""

    def __init__(self, folder: Path) -> None:
        """Opens the index. Raises OSError, ValueError, KeyError, TypeError or AttributeError if the folder is not a
        complete, unchanged index."""
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
        # Mode c maps privately: pages stay shared while nobody writes, and torch accepts the array without warning.
        return np.memmap(self.folder / f"{name}.bin", entry["dtype"], mode="c", shape=tuple(entry["shape"]))

    def _check_changed(self) -> None:
        """Checks the content of files with a new modification time: they may have been copied here, or damaged."""
        changed = {name: written for name, entry in self._arrays.items()
                   if (written := (self.folder / f"{name}.bin").stat().st_mtime_ns) != entry["written"]}  # fmt: skip
        if not changed:
            return
        if bad := [name for name in self.damaged() if name in changed]:
            raise ValueError(f"{', '.join(bad)} has changed")
        for name, written in changed.items():
            self._arrays[name]["written"] = written
        with contextlib.suppress(OSError):  # in a read-only folder, the content is checked again next time
            _write_meta(self.folder, self.notes, self._arrays)

    def discard(self) -> None:
        """Makes the next use of this index convert it again. Arrays that are mapped already stay valid."""
        (self.folder / META).unlink(missing_ok=True)

    def damaged(self) -> list[str]:
        """Reads all arrays and returns the names of those whose content is not what was written. Blocking."""
        return [name for name, entry in self._arrays.items() if _digest(self.folder / f"{name}.bin") != entry["digest"]]


class Writer:
    """Writes rows of named arrays to files; it holds only the rows of one call in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: dict[str, Any] = {}
        self._open: dict[str, tuple[BinaryIO, Any, np.dtype, tuple[int, ...]]] = {}
        self._rows: dict[str, int] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        """Appends rows to an array. rows: [N, ...], with the dtype and row shape of earlier calls."""
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
    """Writes the description of an index atomically, because other processes may be reading it."""
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
    """Returns the folder of all indices: DECENTNODE_CACHE, or decentnode in the user's cache."""
    if chosen := os.environ.get("DECENTNODE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decentnode"


def indexed(
    kind: str, sources: Sequence[Path], options: Mapping[str, Any], build: Callable[[Writer], None],
    folder: Path | None = None, wait_seconds: float = WAIT_SECONDS,
) -> Index:
    """Returns the index of `sources`; if there is none yet, `build` makes it (blocking, logged).

    folder: the folder of all indices, instead of `root()`. Raises DataError if the index cannot be written, or if
    another process that is making it does not finish within wait_seconds. Errors of `build` pass through, and leave no
    files.
    """
    name = f"{kind}-{_key(kind, sources, options)}"
    base = folder or root()
    if (found := _open_index(base / name)) is not None:
        return found
    try:
        base.mkdir(parents=True, exist_ok=True)
        with _locked(base / f".{name}.lock", wait_seconds):
            if (found := _open_index(base / name)) is not None:  # another process has made it in the meantime
                return found
            logger.info("indexing %s once: %d files into %s", kind, len(sources), base / name)
            return _build_index(base, name, build)
    except OSError as error:
        raise DataError(
            f"{base}: {kind} cannot be indexed there: {error}; DECENTNODE_CACHE names another folder") from error


def _build_index(base: Path, name: str, build: Callable[[Writer], None]) -> Index:
    shutil.rmtree(base / name, ignore_errors=True)  # remove an incomplete index
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


def _open_index(folder: Path) -> Index | None:
    try:
        return Index(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the description may contain anything
        return None


@contextlib.contextmanager
def _locked(path: Path, wait_seconds: float) -> Iterator[None]:
    """Admits one process at a time. The kernel holds the lock and releases it if the process dies."""
    with open(path, "a+", encoding="ascii") as file:
        if not _lock(file, wait_seconds):
            file.seek(0)
            raise DataError(
                f"{path}: process {file.read(20).strip() or 'unknown'} has been making this index for "
                f"{wait_seconds:g} s; this process has stopped waiting for it"
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _lock(file: TextIO, wait_seconds: float) -> bool:
    """Returns whether the lock was acquired in time. flock has no timeout, so a thread waits if the lock is held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        waiter = threading.Thread(target=_wait_for_lock, args=(os.dup(file.fileno()),), daemon=True)
        waiter.start()
        waiter.join(wait_seconds)
        return not waiter.is_alive()


def _wait_for_lock(descriptor: int) -> None:
    """Blocks until the lock is acquired, then closes the descriptor.

    descriptor: a duplicate, because the file may be closed by then. The lock is held while either of them is open.
    """
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
