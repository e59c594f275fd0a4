"""Reads the records of a run while its nodes write them. The files serve as the queue: a slow reader makes no node
wait, and no record is queued in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
"""How many bytes of one file are read at a time. A longer line cannot be a record and is skipped."""


class Follower:
    """Yields the unread records of all nodes in a run directory, including nodes that appear later."""

    def __init__(self, run: Path) -> None:
        self._nodes = str(run / "nodes")
        self._read: dict[str, int] = {}
        """path -> bytes read, up to the end of a line."""

    @property
    def uids(self) -> list[int]:
        """The nodes that have a folder in the run directory, which are those of this machine."""
        return sorted(uid for uid, _ in self._files())

    def _files(self) -> list[tuple[int, str]]:
        """Returns (uid, path of metrics.jsonl) of every node's folder."""
        try:
            names = [name for name in os.listdir(self._nodes) if name.isdecimal()]
        except OSError:
            return []
        return sorted((int(name), f"{self._nodes}/{name}/metrics.jsonl") for name in names)

    def poll(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (uid, record) of unread records, at most MAX_BYTES per node. Ignores files that cannot be read now.
        """
        for uid, path in self._files():
            if self._unread_bytes(path):
                yield from ((uid, record) for record in self._read_new(path))

    def _unread_bytes(self, path: str) -> int:
        """Returns how many bytes of a file have not been read yet; 0 if there is no file."""
        try:
            return os.stat(path).st_size - self._read.get(path, 0)
        except OSError:
            return 0

    def _read_new(self, path: str) -> Iterator[dict[str, Any]]:
        begin = self._read.get(path, 0)
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                data = file.read(MAX_BYTES)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        if not end:
            end = len(data) if len(data) == MAX_BYTES else 0
        self._read[path] = begin + end
        for line in data[:end].splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # an incomplete line after a crash
                continue
            if isinstance(record, dict):
                yield record

    def at_end(self) -> bool:
        """Returns whether everything written has been read, except possibly an unfinished last line."""
        return all(self._unread_bytes(path) < MAX_BYTES for _, path in self._files())
