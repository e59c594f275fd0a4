"""What a node is doing right now, written to status.json once per second by a thread of its own.

The training thread is not asked and does not wait; a node that hangs is seen to hang, with whom it waits for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from decentnode.metrics.summary import write_atomic
from decentnode.metrics.writer import encode
from decentnode.node.node import Node

EVERY_SECONDS = 1.0


class StatusWriter(threading.Thread):
    """Writes until `close`."""

    def __init__(self, node: Node, path: Path) -> None:
        super().__init__(name="status", daemon=True)
        self._node, self._path = node, path
        self._over = threading.Event()
        self._last: dict[str, Any] = {}

    def run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self._write("")
        self._write(self._final)

    def _write(self, doing: str) -> None:
        found = snapshot(self._node, doing)
        if {k: v for k, v in found.items() if k != "time"} != {k: v for k, v in self._last.items() if k != "time"}:
            self._last = found
            with contextlib.suppress(OSError):
                write_atomic(self._path, encode(found).decode())

    def close(self, doing: str) -> None:
        """Write once more, with what became of the node."""
        self._final = doing
        self._over.set()
        if self.is_alive():
            self.join(5)

    _final = "ended"


def snapshot(node: Node, doing: str = "") -> dict[str, Any]:
    """The node as plain numbers; any thread."""
    communication = node.communication
    waiting = communication.waiting
    whom, since = waiting if waiting is not None else ((), 0.0)
    return {
        "uid": node.uid, "pid": os.getpid(), "time": time.time(), "round": node.round, "rounds": node.config.rounds,
        "doing": doing or node.doing, "waiting_for": list(whom),
        "waiting_seconds": round(time.monotonic() - since, 1) if whom else 0.0,
        "edges": {
            str(uid): {
                "sent": edge.payload_bytes_sent, "received": edge.payload_bytes_received,
                "chunks": edge.frames_sent, "resends": edge.resends, "wait_seconds": round(edge.wait_seconds, 3),
            }
            for uid, edge in sorted(communication.counters.known())
            if edge.frames_sent or edge.frames_received or edge.wait_seconds
        },
        "faults": dict(communication.counters.faults),
    }  # fmt: skip
