"""One set-up function for the log of a process; the uid stands in every line."""

from __future__ import annotations

import logging
import time
from pathlib import Path

FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s {who} %(name)s: %(message)s"


def set_up(who: str, path: Path | None = None, level: int = logging.INFO) -> None:
    """Send the log of the `decentnode` tree to `path` (appended, line by line) or to stderr, in UTC."""
    handler: logging.Handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler()
    formatter = logging.Formatter(FORMAT.format(who=who), datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("decentnode")
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
