"""Sets up the log of a process; every line names its node."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from decentnode import clock

FORMAT = "%(asctime)s %(levelname)-7s {who} %(name)s: %(message)s"


class _Formatter(logging.Formatter):
    """Formats a line's time from the project's clock (`decentnode.clock`) instead of the machine's."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        return datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


_node: ContextVar[int | None] = ContextVar("node", default=None)
"""The node that the running code belongs to, in a process with several nodes."""


@contextlib.contextmanager
def of_node(uid: int) -> Iterator[None]:
    """Attributes log lines of this thread to node `uid` within the block (see `set_up_nodes`)."""
    token = _node.set(uid)
    try:
        yield
    finally:
        _node.reset(token)


class _ByNode(logging.Handler):
    """Passes each line to the handler of its node; lines that belong to no node go to the first handler."""

    def __init__(self, handlers: Mapping[int, logging.Handler]) -> None:
        super().__init__()
        self._handlers, self._first = dict(handlers), next(iter(handlers.values()))

    def emit(self, record: logging.LogRecord) -> None:
        uid = _node.get()
        (self._first if uid is None else self._handlers.get(uid, self._first)).handle(record)

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.close()
        super().close()


Level = Literal["debug", "info", "warning", "error", "critical"]


def set_level(level: Level) -> None:
    """Leaves out lines below this level from now on."""
    logging.getLogger("decentnode").setLevel(level.upper())


@contextlib.contextmanager
def into(path: Path, who: str) -> Iterator[None]:
    """Sends the log of the `decentnode` tree only to `path` within the block; restores the previous set-up
    afterwards."""
    root, handler = logging.getLogger("decentnode"), logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Formatter(FORMAT.format(who=who)))
    before = root.handlers[:], root.level, root.propagate
    root.handlers[:], root.propagate = [handler], False
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:], root.propagate = before[0], before[2]
        root.setLevel(before[1])
        handler.close()


def set_up(who: str, path: Path) -> None:
    """Sends the log of the `decentnode` tree to `path` (appended, line by line), with times in UTC."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Formatter(FORMAT.format(who=who)))
    _take(handler)


def set_up_nodes(paths: Mapping[int, Path]) -> None:
    """Sends the log of a process with several nodes to one file per node. `of_node` attributes lines to nodes.

    paths: the log file of each uid, in ascending order.
    """
    handlers: dict[int, logging.Handler] = {}
    for uid, path in paths.items():
        handlers[uid] = logging.FileHandler(path, encoding="utf-8")
        handlers[uid].setFormatter(_Formatter(FORMAT.format(who=f"node {uid:03d}")))
    _take(_ByNode(handlers))


def _take(handler: logging.Handler) -> None:
    root = logging.getLogger("decentnode")
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
