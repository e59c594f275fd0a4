"""Reads growing files of JSON lines, each time from where the last read stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 4 << 20
"""Longest line that is read; longer ones, which no run writes, are skipped."""


class Replaced(Exception):
    """Raised if the file was replaced by another one, or truncated, since it was last read."""


class Tail:
    """One file. It is open only during `read`: a run of thousands of nodes has more files than a process may open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = -1
        self._in_long_line = False
        self.size = 0
        """Size of the file at the last `look`."""

    @property
    def left(self) -> int:
        """Number of unread bytes, as of the last `look`."""
        return max(0, self.size - self._offset)

    @property
    def offset(self) -> int:
        """Number of bytes read so far."""
        return self._offset

    def look(self) -> bool:
        """Checks the file's size. Returns whether there is something new to read; False if there is no file. Raises
        Replaced."""
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        if self._inode not in (-1, found.st_ino) or found.st_size < self._offset:
            raise Replaced(str(self._path))
        changed, self.size = found.st_size != self.size, found.st_size
        self._inode = found.st_ino
        return changed or self.left > 0

    def read(self, most_bytes: int) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects on complete lines among the next `most_bytes`; skips lines that are not valid
        objects. An unfinished last line is left for the next read."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(most_bytes)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) >= most_bytes and most_bytes < MAX_LINE_BYTES:
                yield from self.read(MAX_LINE_BYTES)
            elif len(data) >= MAX_LINE_BYTES:  # skipped piece by piece, so that memory stays bounded
                self._offset, self._in_long_line = self._offset + len(data), True
            return
        self._offset += end
        for index, line in enumerate(data[:end].splitlines()):
            if self._in_long_line and index == 0:
                self._in_long_line = False
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record
