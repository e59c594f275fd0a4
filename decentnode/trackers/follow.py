"""Reads the records of a run while its nodes write them. The files are the queue: however slow the reader is, no node
waits, and no record waits in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""That are read of one file at a time; a longer line is no record, and left out."""


class Follower:
    """Yields the records of all nodes in a run directory that were not read yet, also of nodes that come later."""

    def __init__(self, run: Path) -> None:
        self._nodes = str(run / "nodes")
        self._read: dict[str, int] = {}
        """How many bytes of each file were read, up to the end of a line."""

    @property
    def uids(self) -> list[int]:
        """The nodes that have a folder in the run directory: those of this machine."""
        return sorted(uid for uid, _ in self._files())

    def _files(self) -> list[tuple[int, str]]:
        """Returns (uid, path of metrics.jsonl) of every node's folder."""
        try:
            names = [name for name in os.listdir(self._nodes) if name.isdecimal()]
        except OSError:
            return []
        return sorted((int(name), f"{self._nodes}/{name}/metrics.jsonl") for name in names)

    def poll(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (uid, record), at most MOST_BYTES of each node. Raises no error for what cannot be read now."""
        for uid, path in self._files():
            if self._unread(path):
                yield from ((uid, record) for record in self._more(path))

    def _unread(self, path: str) -> int:
        """Returns how many bytes of a file were not read yet; 0 where there is none."""
        try:
            return os.stat(path).st_size - self._read.get(path, 0)
        except OSError:
            return 0

    def _more(self, path: str) -> Iterator[dict[str, Any]]:
        begin = self._read.get(path, 0)
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                data = file.read(MOST_BYTES)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        if not end:
            end = len(data) if len(data) == MOST_BYTES else 0
        self._read[path] = begin + end
        for line in data[:end].splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # torn by a crash
                continue
            if isinstance(record, dict):
                yield record

    def at_end(self) -> bool:
        """Whether everything that is written has been read, other than a line without its end."""
        return all(self._unread(path) < MOST_BYTES for _, path in self._files())
