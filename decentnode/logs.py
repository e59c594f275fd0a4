"""One set-up function for the log of a process; the uid stands in every line."""

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
    """Takes the time of a line from the project's clock; logging itself reads the machine's."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        return datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


_node: ContextVar[int | None] = ContextVar("node", default=None)
"""The node that the running code belongs to, in a process of several."""


@contextlib.contextmanager
def of_node(uid: int) -> Iterator[None]:
    """In this block, on this thread, lines are those of node `uid` (`set_up_nodes`)."""
    token = _node.set(uid)
    try:
        yield
    finally:
        _node.reset(token)


class _ByNode(logging.Handler):
    """Gives each line to the handler of its node; one that belongs to no node in particular goes to the first."""

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
    """From now on lines below this level are left out."""
    logging.getLogger("decentnode").setLevel(level.upper())


@contextlib.contextmanager
def into(path: Path, who: str) -> Iterator[None]:
    """Send the log of the `decentnode` tree to `path` alone in this block; what the program had set up holds again
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
    """Send the log of the `decentnode` tree to `path` (appended, line by line), in UTC."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Formatter(FORMAT.format(who=who)))
    _take(handler)


def set_up_nodes(paths: Mapping[int, Path]) -> None:
    """Send the log of a process of several nodes to a file for each, by uid, in ascending order; `of_node` says which
    node a line belongs to."""
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
