"""The current state of a run: what its nodes are doing, whether it is in progress, and its machines with their load."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from decentnode import clock
from decentnode.config.yaml_source import load_plain
from decentnode.launch.files.supervisor_file import died
from decentnode.metrics import summary as summaries
from decentnode.report.reading.run_status import state_of

MAX_WAITED = 32
MAX_STATUS_BYTES = 1 << 20
MAX_MACHINES = 256
NODES_SECONDS, MACHINES_SECONDS = 1.0, 2.0
"""Least times between two reads of the nodes' status, which they write once a second, and of the machines' load."""


class Status:
    """Reads the nodes' status.json of one run: what each node is doing. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[int, tuple[int, int, dict[str, Any]]] = {}
        """uid -> (modification time of the file, version at its last change, contents)."""
        self._polled_at = -NODES_SECONDS
        self.version = 0

    def poll(self, uids: list[int]) -> None:
        """Reads the files of these nodes, at most every NODES_SECONDS. Blocking."""
        now = clock.now()
        if now - self._polled_at < NODES_SECONDS:
            return
        self._polled_at = now
        self.version += 1
        for uid in uids:
            path = self._path / "nodes" / f"{uid:03d}" / "status.json"
            try:
                written = os.stat(path).st_mtime_ns
                before = self._files.get(uid)
                found = before[2] if before is not None and before[0] == written else _read(path)
                found["doing"] = state_of(found)
            except (OSError, ValueError, TypeError, AttributeError):
                continue
            if before is None or before[0] != written or _describe(before[2]) != _describe(found):
                self._files[uid] = written, self.version, found
            found["told"] = _describe(found)

    def changes(self, since: int) -> dict[str, Any]:
        """Returns uid -> what the node is doing, for nodes with a change after version `since`; for JSON."""
        return {str(uid): found["told"] for uid, (_, version, found) in self._files.items() if version > since}

    @property
    def pids(self) -> set[int]:
        """Process numbers of the nodes."""
        return {pid for _, _, found in self._files.values() if isinstance(pid := found.get("pid"), int) and pid > 0}


def _read(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        found = json.loads(file.read(MAX_STATUS_BYTES))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold one object")
    return found


def _describe(status: Mapping[str, Any]) -> dict[str, Any]:
    if "told" in status and status["told"]["doing"] == status.get("doing"):
        return dict(status["told"])
    peers = status.get("waiting_for")
    seconds = status.get("waiting_seconds")
    return {
        "doing": str(status.get("doing", ""))[:80],
        "for": [uid for uid in peers if isinstance(uid, int)][:MAX_WAITED] if isinstance(peers, list) else [],
        "seconds": seconds if isinstance(seconds, int | float) else 0.0,
    }


MAX_WHY = 300
"""Longest reason for a failure, in characters."""


def state_of_run(path: Path) -> dict[str, Any]:
    """Returns a run's state (running, finished, interrupted, failed, died, unfinished), the figures of its summary, and
    why it failed or died ("" otherwise)."""
    try:
        found = summaries.read(path / "summary.json")
        figures = {key: value for key, value in found.items() if isinstance(value, int | float | str)}
        failure = found.get("failure")
        why = str(failure.get("title", "")).partition("\n")[0][:MAX_WHY] if isinstance(failure, dict) else ""
        return {"state": str(found.get("status", "finished")), "figures": figures, "why": why}
    except (OSError, ValueError):
        pass
    if died(path):
        return {"state": "died", "figures": {}, "why": "its supervisor ended without a result"}
    return {"state": "running" if (path / "supervisor.json").exists() else "unfinished", "figures": {}, "why": ""}


class Machines:
    """The machines of one run, and the load of the one on which the dashboard runs. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped: list[dict[str, Any]] = []
        self._processes: dict[int, psutil.Process] = {}
        self._polled_at = -MACHINES_SECONDS
        self._network: tuple[float, float, float] | None = None
        self._last_result: list[dict[str, Any]] = []

    def poll(self, pids: set[int]) -> list[dict[str, Any]]:
        """Returns the machines with host, nodes and hardware, and the load of this machine; for JSON. Blocking.
        pids: processes of the run's nodes."""
        now = clock.now()
        if now - self._polled_at < MACHINES_SECONDS:
            return self._last_result
        self._polled_at = now
        self._mapped = self._mapped or self._read_mapping()
        environments = self._environment()
        self._last_result = []
        for machine in self._mapped:
            known = environments.get(machine["machine"], {})
            is_this_machine = bool(known) and known.get("host") == socket.gethostname()
            hardware = {key: str(known[key])[:120] for key in ("cpu", "cores", "memory", "system") if key in known}
            load = {"load": self._load(pids, now)} if is_this_machine else {}
            self._last_result.append(machine | hardware | load)
        return self._last_result

    def _read_mapping(self) -> list[dict[str, Any]]:
        try:
            with open(self._path / "mapping.yaml", "rb") as file:
                places = load_plain(file.read())
            found: dict[int, dict[str, Any]] = {}
            for place in places:
                machine = found.setdefault(int(place["machine"]), {
                    "machine": int(place["machine"]), "host": str(place.get("host"))[:120], "uids": []})  # fmt: skip
                machine["uids"].append(int(place["uid"]))
            return [found[machine] for machine in sorted(found)][:MAX_MACHINES]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
            return []

    def _environment(self) -> dict[int, dict[str, Any]]:
        """Returns machine number -> contents of the folder's env.json; empty if there is none yet."""
        try:
            found = json.loads((self._path / "env.json").read_text(encoding="utf-8"))
            return {int(found.get("machine", 0)): found}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _load(self, pids: set[int], now: float) -> dict[str, Any]:
        memory, network = psutil.virtual_memory(), psutil.net_io_counters()
        before, self._network = self._network, (now, network.bytes_sent, network.bytes_recv)
        rates = [0.0, 0.0]
        if before is not None and now > before[0]:
            rates = [(self._network[at] - before[at]) / (now - before[0]) for at in (1, 2)]
        self._processes = {pid: self._processes.get(pid) or process for pid in pids
                           if (process := _process(pid)) is not None}  # fmt: skip
        cpu = resident = 0.0
        for process in self._processes.values():
            try:
                cpu += process.cpu_percent() / 100
                resident += process.memory_info().rss
            except psutil.Error:
                continue
        return {"cores": psutil.cpu_count(), "busy": psutil.cpu_percent(percpu=True),
                "memory": [memory.total - memory.available, memory.total], "network": rates,
                "run_cores": cpu, "run_memory": resident}  # fmt: skip


def _process(pid: int) -> psutil.Process | None:
    """Returns the process; None if it is gone, or not a Python process, because its number may have been reused."""
    try:
        process = psutil.Process(pid)
        return process if "python" in process.name() or "decentnode" in process.name() else None
    except psutil.Error:
        return None
