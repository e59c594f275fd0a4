"""Reads a folder with one machine's part of a run without trusting it: follows no link in it and reads only regular
files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Parts = tuple[str, ...]
"""The components of a path below a folder."""

RECORDS = ("metrics.jsonl", "events.jsonl")
"""Append-only files of a node: of two copies, one has to begin with the whole of the other."""
STATUS = "status.json"
UID, RUN_ID = re.compile(r"\d{3}|[1-9]\d{3,5}"), re.compile(r"[0-9a-f]{16}")
MAX_DEPTH = 6
"""How many levels below a given folder run folders are searched, and a node's files below the node's folder."""
MAX_STATUS_BYTES = 1 << 24


class Share:
    """A folder with one machine's part of a run, in which no link is followed. Holds a file descriptor until `close`.
    """

    def __init__(self, path: Path) -> None:
        """Opens the folder. Raises OSError if that fails."""
        self.path = path
        self.left_out: set[str] = set()
        """Paths that are neither a regular file nor a folder, or are too deep."""
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root)

    @contextlib.contextmanager
    def _folder(self, parts: Parts) -> Iterator[int]:
        """Yields a file descriptor of a folder below. Raises OSError, for example for a link in the path."""
        descriptor = os.dup(self._root)
        try:
            for part in parts:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def names(self, *parts: str) -> list[str]:
        """Returns the sorted names in a folder; empty if there is no such folder."""
        try:
            with self._folder(parts) as folder:
                return sorted(os.listdir(folder))
        except OSError:
            return []

    def files(self, *parts: str, depth: int = MAX_DEPTH) -> Iterator[Parts]:
        """Yields the regular files below a folder, at most `depth` levels deeper, and adds others to `left_out`."""
        for name in self.names(*parts):
            below = (*parts, name)
            try:
                with self._folder(parts) as folder:
                    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            except OSError:  # removed since it was listed
                continue
            if stat.S_ISREG(mode):
                yield below
            elif stat.S_ISDIR(mode) and depth:
                yield from self.files(*below, depth=depth - 1)
            else:
                self.left_out.add("/".join(below))

    @contextlib.contextmanager
    def open(self, parts: Parts) -> Iterator[BinaryIO]:
        """Yields a regular file, open for reading. Raises OSError for anything else."""
        with self._folder(parts[:-1]) as folder:
            number = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise OSError(f"{'/'.join(parts)} is not a regular file")
            yield file

    def has(self, parts: Parts) -> bool:
        try:
            with self.open(parts):
                return True
        except OSError:
            return False

    @property
    def uids(self) -> list[int]:
        """The uids of nodes that have at least one file in their folder."""
        return [int(name) for name in self.names("nodes")
                if UID.fullmatch(name) and next(self.files("nodes", name), None) is not None]  # fmt: skip

    def status(self, uid: int) -> dict[str, Any]:
        """Returns the content of a node's status.json; empty if it cannot be read."""
        try:
            with self.open(("nodes", f"{uid:03d}", STATUS)) as file:
                found = json.loads(file.read(MAX_STATUS_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def runs(self) -> set[str]:
        """Returns the run ids in the nodes' status.json. All machines agree on a run's id at its start."""
        ids = (self.status(uid).get("run") for uid in self.uids)
        return {each for each in ids if isinstance(each, str) and RUN_ID.fullmatch(each)}
