"""The folder of a sweep: it has a folder per point, named by the point's digest, with the point's run and outcome.

    runs/NAME/sweep/points/DIGEST/settings.json       the values of the point
                                  NAME/TIME-ID/       its run, as `decentnode run` leaves one
                                  outcome.json        how it ended; written last, atomically

A point without an outcome was never run, was stopped or was killed. Points with the same digest share one run,
whichever command of this folder asks for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from decentnode.checkpoint.store import FOLDER as CHECKPOINTS
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.sweeps.point import PreparedPoint
from decentnode.system import write_atomic

Status = Literal["finished", "diverged", "failed", "killed", "invalid"]
"""How a point ended. diverged: running it again would give the same, so it counts as done. killed: its process ended
without writing an outcome. invalid: its experiment has problems, and nothing was run."""


@dataclass(frozen=True)
class Outcome:
    """How a point ended."""

    status: Status
    run: str = ""
    """The folder of its run, relative to the point's; "" if there is no run."""
    title: str = ""
    """If it did not finish, the reason in one line."""
    exit_code: int = 0
    seconds: float = 0.0
    """From the start of its process to the end."""

    @property
    def done(self) -> bool:
        """Whether a later command need not run it again."""
        return self.status in ("finished", "diverged")


class Store:
    """Reads and writes the folder of a sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def point(self, digest: str) -> Path:
        return self.folder / "points" / digest

    def outcome(self, digest: str) -> Outcome | None:
        """Returns the outcome of a point; None if there is none, or it cannot be read."""
        try:
            fields = json.loads((self.point(digest) / "outcome.json").read_text(encoding="utf-8"))
            outcome = Outcome(**{key: fields[key] for key in Outcome.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        is_lost = outcome.status == "finished" and self.run(digest, outcome) is None
        return None if outcome.status not in get_args(Status) or is_lost else outcome

    def run(self, digest: str, outcome: Outcome) -> Path | None:
        """Returns the folder of a point's run; None if it was removed."""
        folder = self.point(digest) / outcome.run
        return folder if outcome.run and (folder / "config.resolved.yaml").is_file() else None

    def open(self, prepared: PreparedPoint) -> Path:
        """Creates a point's folder and removes an earlier outcome. Returns the folder. Raises EnvironmentFault."""
        folder = self.point(prepared.digest)
        point = prepared.point
        record = {"settings": dict(point.settings), "seed": point.seed, "rounds": prepared.rounds}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "outcome.json").unlink(missing_ok=True)
            write_atomic(folder / "settings.json", json.dumps(record, indent=2) + "\n")
        except OSError as error:
            raise EnvironmentFault(f"cannot write to the sweep's folder {folder}: {error.strerror}; choose another "
                                   "place with --run-dir") from error  # fmt: skip
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against other commands while entered. Raises UsageError if another command is using it,
        EnvironmentFault if it cannot be written."""
        path = self.folder / "lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {self.folder}: {error.strerror}; choose another place with "
                                   "--run-dir") from error  # fmt: skip
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(file, 32, 0).decode(errors="replace").strip()
                raise UsageError(f"another sweep (process {holder or 'unknown'}) is using {self.folder}; wait for it, "
                                 "or choose another --name or --run-dir") from None  # fmt: skip
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(file)


def write_outcome(point: Path, outcome: Outcome) -> None:
    """Writes the outcome of a point atomically. Raises OSError."""
    write_atomic(point / "outcome.json", json.dumps(asdict(outcome), indent=2) + "\n", durable=True)


def has_checkpoints(runs: Path) -> bool:
    """Returns whether a run in this folder has a checkpoint of at least one node."""
    return any(runs.glob(f"*/{CHECKPOINTS}/*/[0-9]*.json"))


def remove_node_models(run: Path) -> None:
    """Removes the models of the single nodes from a run and keeps the merged one. A model per node and point would fill
    disks."""
    for path in (run / "models").glob("[0-9]*.safetensors"):
        with contextlib.suppress(OSError):
            path.unlink()


