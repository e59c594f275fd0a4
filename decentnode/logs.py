"""One set-up function for the log of a process; the uid stands in every line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from decentnode import clock

FORMAT = "%(asctime)s %(levelname)-7s {who} %(name)s: %(message)s"


class _Formatter(logging.Formatter):
    """Takes the time of a line from the project's clock; logging itself reads the machine's."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        return datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


Level = Literal["debug", "info", "warning", "error", "critical"]


def set_level(level: Level) -> None:
    """From now on lines below this level are left out."""
    logging.getLogger("decentnode").setLevel(level.upper())


@contextlib.contextmanager
def into(path: Path, who: str, level: int = logging.INFO) -> Iterator[None]:
    """Send the log of the `decentnode` tree to `path` alone in this block; what the program had set up holds again
    afterwards."""
    root, handler = logging.getLogger("decentnode"), logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Formatter(FORMAT.format(who=who)))
    before = root.handlers[:], root.level, root.propagate
    root.handlers[:], root.propagate = [handler], False
    root.setLevel(level)
    try:
        yield
    finally:
        root.handlers[:], root.propagate = before[0], before[2]
        root.setLevel(before[1])
        handler.close()


def set_up(who: str, path: Path | None = None, level: int = logging.INFO) -> None:
    """Send the log of the `decentnode` tree to `path` (appended, line by line) or to stderr, in UTC."""
    handler: logging.Handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler()
    handler.setFormatter(_Formatter(FORMAT.format(who=who)))
    root = logging.getLogger("decentnode")
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
