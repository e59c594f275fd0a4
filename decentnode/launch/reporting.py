"""A node's records on their way: every one to metrics.jsonl, some to the supervisor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decentnode.launch.messages import ChildMessage, Progress
from decentnode.metrics.writer import MetricsWriter, finite

Send = Callable[[ChildMessage], None]


class Reporter:
    """`record` for one node. A supervisor that cannot be told does not stop the training."""

    def __init__(self, uid: int, path: Path | None, send: Send, progress_seconds: float) -> None:
        """path: metrics.jsonl, or None to write nothing. Raises OSError when it cannot be opened."""
        self.uid = uid
        self._writer = MetricsWriter(path) if path is not None else None
        self._send = send
        self._progress_seconds = progress_seconds
        self._sent = 0.0
        self._unsent: dict[str, Any] | None = None

    def record(self, record: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(record)
        now = time.monotonic()
        if record.get("kind") == "round" and now - self._sent < self._progress_seconds:
            self._unsent = record
            return
        self._sent = now
        with contextlib.suppress(OSError):
            for each in (self._unsent, record) if record.get("kind") != "round" else (record,):
                if each is not None:
                    self._send(Progress(self.uid, finite(each)))
        self._unsent = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
