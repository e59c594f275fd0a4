"""What `decentnode status` reads of a node: what it does, for whom it waits, what its edges have carried."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.metrics.writer import encode
from decentnode.node.node import Node
from decentnode.system import write_atomic

STATUS_SECONDS, MAX_STATUS_SECONDS = 1.0, 30.0
"""Shortest and longest time between two writings of status.json."""
STATUS_SHARE = 0.01
"""What of a core the writing may take: of a process with hundreds of nodes it would take a tenth."""


class StatusWriter(threading.Thread):
    """Writes the status.json of nodes once per second until `close`, rarer where that takes more than STATUS_SHARE, in
    a thread of its own: the training thread is neither asked nor waits, so that a node that hangs is seen to hang, with
    the nodes that it waits for. A node that was started again counts on from what its processes before had written."""

    def __init__(self, nodes: Mapping[Path, Node]) -> None:
        """nodes: of this process, by their file."""
        super().__init__(name="status", daemon=True)
        self._nodes = dict(nodes)
        self._over = threading.Event()
        self._before = {path: found for path in nodes if (found := written(path))}
        self._last: dict[Path, dict[str, Any]] = {}
        self._ends: dict[int, str] = {}
        """uid -> how the node ended."""

    def run(self) -> None:
        pause = STATUS_SECONDS
        while not self._over.wait(pause):
            began = clock.thread_cpu()
            self._write()
            pause = pause_after(clock.thread_cpu() - began)
        self._write()

    def _write(self) -> None:
        for path, node in self._nodes.items():
            found, last = snapshot(node, self._ends.get(node.uid, "")), self._last.get(path, {})
            if before := self._before.get(path):
                found |= {counts: added(before[counts], found[counts]) for counts in ("edges", "faults")}
            if {k: v for k, v in found.items() if k != "time"} != {k: v for k, v in last.items() if k != "time"}:
                self._last[path] = found
                with contextlib.suppress(OSError):
                    write_atomic(path, encode(found).decode())

    def close(self, ends: Mapping[int, str]) -> None:
        """Write once more, with what each node's end was (finished, stopped, left, failed), by uid, and end the thread.
        Blocking for 5 s at most."""
        self._ends = dict(ends)
        self._over.set()
        if self.is_alive():
            self.join(5)


def pause_after(seconds: float) -> float:
    """Returns how long to wait after a writing that took so much of a core."""
    return min(max(STATUS_SECONDS, seconds / STATUS_SHARE), MAX_STATUS_SECONDS)


def written(path: Path) -> dict[str, Any]:
    """Returns a node's status as it was written last; nothing where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) and found.keys() >= {"edges", "faults"} else {}
    except (OSError, ValueError):
        return {}


def added(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sums of numbers that have the same keys, at any depth."""
    found = dict(before)
    for key, value in now.items():
        nested = isinstance(value, Mapping)
        found[key] = added(found.get(key, {}), value) if nested else round(found.get(key, 0) + value, 3)
    return found


def snapshot(node: Node, doing: str = "") -> dict[str, Any]:
    """Returns the state of a node as plain numbers and texts. Any thread may call it."""
    communication = node.communication
    waiting = communication.waiting
    whom, since = waiting if waiting is not None else ((), 0.0)
    run = communication.run_id
    return {
        **({"run": run.hex()} if any(run) else {}),  # once it is agreed on, by which the machines of a run are told
        "uid": node.uid, "pid": os.getpid(), "time": clock.wall(), "round": node.round, "rounds": node.config.rounds,
        "doing": doing or node.doing, "waiting_for": list(whom),
        "waiting_seconds": round(clock.now() - since, 1) if whom else 0.0,
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
