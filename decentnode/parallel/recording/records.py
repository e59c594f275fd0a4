"""Writes one rank's records into its folder of the run's directory, and reads them from there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import statistics
from io import FileIO
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.errors import EnvironmentFault
from decentnode.metrics import reader
from decentnode.metrics.run_folder import node_dir
from decentnode.metrics.writer import MetricsWriter, encode
from decentnode.system import write_atomic

LOCK_SECONDS = 10.0
"""How long a rank waits for the process that recorded before it: one whose peer was killed needs a moment to end."""
RETRY_SECONDS = 0.1


class RankRecords:
    """The records (metrics.jsonl) and the status file of a rank; locked against other processes."""

    def __init__(self, run: Path, uid: int) -> None:
        """Makes the rank's folder in the run's directory and locks it. Blocking for LOCK_SECONDS at most. Raises
        OSError, EnvironmentFault if another process records there."""
        self._uid, self._folder = uid, node_dir(run, uid)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self._folder)
        self._writer = MetricsWriter(self._folder / "metrics.jsonl")
        self.bytes_sent_before = 0
        """Bytes that earlier processes of the run had sent."""

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        self._writer.write(record)

    @property
    def epochs(self) -> int:
        """The number of epochs that have records."""
        records = reader.read(self._folder / "metrics.jsonl")
        return max((record["round"] + (record["kind"] != "evaluation") for record in records), default=0)

    def drop_from(self, epoch: int) -> None:
        """Drops the records of this epoch and of all after it, which will be trained again; an evaluation before its
        first step is kept. -1: drops all."""
        path = self._folder / "metrics.jsonl"
        kept = [record for record in reader.read(path) if record["round"] < epoch + (record["kind"] == "evaluation")]
        self.bytes_sent_before = max((int(record.get("data_bytes_sent", 0)) for record in kept), default=0)
        write_atomic(path, b"".join(map(encode, kept)).decode())
        self._writer.close()
        self._writer = MetricsWriter(path)

    def write_status(self, doing: str, epoch: int, planned: int) -> None:
        """Writes what this rank is doing, for `decentnode status`; failures of the disk are ignored."""
        status = {"uid": self._uid, "pid": os.getpid(), "time": clock.wall(), "round": epoch, "rounds": planned,
                  "doing": doing, "waiting_for": [], "waiting_seconds": 0.0, "edges": {}, "faults": {}}  # fmt: skip
        with contextlib.suppress(OSError):
            write_atomic(self._folder / "status.json", json.dumps(status))

    def close(self) -> None:
        """Closes the files and releases the lock."""
        self._writer.close()
        self._lock.close()


def figures_of(run: Path, uid: int) -> dict[str, Any]:
    """Returns a node's closing figures, as far as it has recorded, by the names of summary.json."""
    records = list(reader.read(node_dir(run, uid) / "metrics.jsonl"))
    rounds = [each for each in records if each["kind"] == "round"]
    last: dict[str, Any] = next((each for each in reversed(records) if each["kind"] == "evaluation"), {})
    seconds = [each["seconds"] for each in rounds]
    measured = {key: value for key, value in last.items() if key not in ("kind", "time", "round", "contributors")}
    return measured | {
        "uid": uid, "rounds": len(rounds), "evaluated_round": last.get("round"),
        "round_seconds_median": statistics.median(seconds) if seconds else None,
        "round_seconds_total": sum(seconds), "wait_seconds": sum(each["wait_seconds"] for each in rounds),
        "bytes_data": rounds[-1]["data_bytes_sent"] if rounds else 0, "bytes_metadata": 0,
    }  # fmt: skip


def lock_folder(folder: Path) -> FileIO:
    """Locks a node's folder against other processes that would record there, until the returned file is closed or this
    process ends, in whatever way. Blocking for LOCK_SECONDS at most. Raises OSError, EnvironmentFault if a process
    still records: if only the launcher was killed, its ranks continue to train.

    The lock belongs to the process (fcntl): workers that it has forked do not hold it.
    """
    path, until = folder / "lock", clock.now() + LOCK_SECONDS
    file = FileIO(path, "a")
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return file  # the file system has no locks
            if clock.now() > until:
                file.close()
                raise EnvironmentFault(f"another process still writes to {folder} (its status.json has the pid): end "
                                       "that process, or move the run away") from None  # fmt: skip
        else:
            return file
        clock.sleep(RETRY_SECONDS)
