"""Appends records to metrics.jsonl, one JSON object per line. A full disk does not stop the training."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from decentnode.system import check_disk

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 << 20
"""The maximum size of lines kept in memory while the disk is full: over 50,000 rounds of one node at about 300
bytes."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE})
"""Errors of the operating system after which writing may succeed later."""


def encode(record: dict[str, Any]) -> bytes:
    """Returns a record as one line of JSON. NaN and infinity become null, which every JSON reader accepts."""
    try:
        text = _JSON.encode(record)
    except ValueError:
        text = _JSON.encode(finite(record))
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """Converts NumPy and torch scalars for `json`."""
    number = value.item()
    return number if not isinstance(number, float) or math.isfinite(number) else None


_JSON = json.JSONEncoder(allow_nan=False, default=_plain, separators=(",", ":"))


def finite(value: Any) -> Any:
    """Returns the same value with None in place of every float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class MetricsWriter:
    """Writes records to a file. `write` returns after it has given the record to the operating system or, if the disk
    is full, has kept it in memory to be written later."""

    def __init__(self, path: Path, max_pending_bytes: int = MAX_PENDING_BYTES, spared: bool = False) -> None:
        """Opens `path` for appending. Raises OSError if that fails.

        spared: whether injected faults that fill the disk leave this file writable.
        """
        self.path = path
        self._spared = spared
        self.max_pending_bytes = max_pending_bytes
        self.lost = 0
        """How many records were dropped because the disk was full and `max_pending_bytes` were already kept."""
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._refused = False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._ends_incomplete():
            self._keep(b"\n")

    def _ends_incomplete(self) -> bool:
        """Returns whether the file ends with an incomplete line, left by an earlier writer."""
        if not os.fstat(self._file).st_size:
            return False
        try:
            with open(self.path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        except OSError:
            return False

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record. If the disk is full, it is kept, and the first such failure is logged. Raises other
        OSErrors."""
        self._keep(encode(record))
        self._flush()

    def append(self, lines: bytes) -> None:
        """Writes already encoded records, each with its newline, as `write` does."""
        self._keep(lines)
        self._flush()

    def _keep(self, line: bytes) -> None:
        if self._pending_bytes + len(line) > self.max_pending_bytes and self._pending:
            self.lost += 1
            return
        self._pending.append(line)
        self._pending_bytes += len(line)

    def _flush(self) -> None:
        try:
            if not self._spared:
                check_disk()
            while self._pending:
                line = self._pending[0]
                written = os.write(self._file, line)
                self._pending_bytes -= written
                if written < len(line):
                    self._pending[0] = line[written:]
                else:
                    self._pending.popleft()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self._refused:
                self._refused = True
                logger.warning("%s: %s; training continues, metrics are kept in memory", self.path,
                               os.strerror(error.errno))  # fmt: skip
            return
        if self._refused:
            self._refused = False
            logger.warning("%s: writing works again%s", self.path, f", {self.lost} records lost" if self.lost else "")

    @property
    def pending(self) -> int:
        """How many records are kept in memory because they could not be written yet."""
        return len(self._pending)

    def close(self) -> None:
        """Tries once more to write the kept records, then closes the file. Idempotent."""
        if self._file < 0:
            return
        self._flush()
        if self._pending or self.lost:
            logger.warning("%s: %d records could not be written", self.path, self.pending + self.lost)
        file, self._file = self._file, -1
        os.close(file)
