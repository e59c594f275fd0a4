"""Writes a node's status.json for `decentnode status`: what the node does, for which nodes it waits, and the traffic on
its edges."""

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
"""Shortest and longest time between two writes of status.json."""
STATUS_SHARE = 0.01
"""Share of a core that the writing may take; unlimited, it would be a tenth for a process with hundreds of nodes."""


class StatusWriter(threading.Thread):
    """Writes the status.json of nodes once per second until `close`, less often if that takes more than STATUS_SHARE of
    a core. It runs in its own thread, without any help of the training thread, so that the status also shows a node
    that hangs, and the nodes that it waits for. The counts of a restarted node continue those of its earlier processes.
    """

    def __init__(self, nodes: Mapping[Path, Node]) -> None:
        """nodes: path of status.json -> node, for the nodes of this process."""
        super().__init__(name="status", daemon=True)
        self._nodes = dict(nodes)
        self._over = threading.Event()
        self._earlier_counts = {path: found for path in nodes if (found := read_status(path))}
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
            status, last = snapshot(node, self._ends.get(node.uid, "")), self._last.get(path, {})
            if before := self._earlier_counts.get(path):
                status |= {counts: add_counts(before[counts], status[counts]) for counts in ("edges", "faults")}
            if {k: v for k, v in status.items() if k != "time"} != {k: v for k, v in last.items() if k != "time"}:
                self._last[path] = status
                with contextlib.suppress(OSError):
                    write_atomic(path, encode(status).decode())

    def close(self, ends: Mapping[int, str]) -> None:
        """Writes a last time, with how each node ended (uid -> finished, stopped, left or failed), and ends the thread.
        Blocking for at most 5 s."""
        self._ends = dict(ends)
        self._over.set()
        if self.is_alive():
            self.join(5)


def pause_after(seconds: float) -> float:
    """Returns how long to wait after a write that took this much CPU time."""
    return min(max(STATUS_SECONDS, seconds / STATUS_SHARE), MAX_STATUS_SECONDS)


def read_status(path: Path) -> dict[str, Any]:
    """Returns the last status that was written to `path`; empty if there is none that can be read."""
    try:
        status = json.loads(path.read_text())
        return status if isinstance(status, dict) and status.keys() >= {"edges", "faults"} else {}
    except (OSError, ValueError):
        return {}


def add_counts(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested sums of two nested mappings of numbers, key by key."""
    sums = dict(before)
    for key, value in now.items():
        nested = isinstance(value, Mapping)
        sums[key] = add_counts(sums.get(key, {}), value) if nested else round(sums.get(key, 0) + value, 3)
    return sums


def snapshot(node: Node, doing: str = "") -> dict[str, Any]:
    """Returns the state of a node as plain numbers and strings. Any thread may call it. doing: replaces
    `node.doing`, such as by how the node ended."""
    communication = node.communication
    waiting = communication.waiting
    peers, since = waiting if waiting is not None else ((), 0.0)
    run = communication.run_id
    return {
        **({"run": run.hex()} if any(run) else {}),  # once agreed on; identifies the run across machines
        "uid": node.uid, "pid": os.getpid(), "time": clock.wall(), "round": node.round, "rounds": node.config.rounds,
        "doing": doing or node.doing, "waiting_for": list(peers),
        "waiting_seconds": round(clock.now() - since, 1) if peers else 0.0,
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
