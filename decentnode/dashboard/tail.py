"""Reads files of JSON lines from where it stopped the last time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_LINE_BYTES = 4 << 20
"""A longer line is skipped: no writer of a run makes one."""


class Replaced(Exception):
    """The file is another one than was read so far, or was cut short."""


class Tail:
    """One file. It is open only while `read` runs: runs of thousands of nodes have more files than a process may."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = -1
        self._in_long_line = False
        self.size = 0
        """Of the file, when it was looked at last."""

    @property
    def left(self) -> int:
        """How many bytes were not read when the file was looked at last."""
        return max(0, self.size - self._offset)

    @property
    def offset(self) -> int:
        """How many bytes were read."""
        return self._offset

    def look(self) -> bool:
        """Returns whether there is something new; False where there is no file. Raises Replaced."""
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
        """Yields the objects on whole lines among the next `most_bytes`; what is torn, or no object, is skipped. An
        unfinished last line is left for the next time."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(most_bytes)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) >= most_bytes and most_bytes < MOST_LINE_BYTES:
                yield from self.read(MOST_LINE_BYTES)
            elif len(data) >= MOST_LINE_BYTES:  # skipped piece by piece, so that memory stays bounded
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
